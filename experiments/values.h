// The points and results of experiments: named numbers and words in the order of their columns. As text they are JSON
// objects.
//
// Thread safety: plain values.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace xpyd::experiments {

template <class T>  // the types that convert from and to a number; `char` is none
concept Number = sizeof(T) > 1 && std::is_arithmetic_v<T>;

class Value {
 public:
  Value() = default;
  template <Number T>
  Value(T number) {
    if constexpr (std::is_floating_point_v<T>)
      value_ = double(number);
    else
      value_ = int64_t(number);
  }
  Value(std::string word) : value_(std::move(word)) {}
  Value(const char* word) : value_(std::string(word)) {}

  // Reading a word as a number, or the other way round, is a bug in the experiment.
  template <Number T>
  operator T() const {
    const int64_t* whole = std::get_if<int64_t>(&value_);
    return whole ? T(*whole) : T(real());
  }
  operator std::string() const;

  bool is_number() const { return !std::holds_alternative<std::string>(value_); }
  bool operator==(const Value&) const = default;
  std::string dump() const;  // 4, 0.5, "paged"

 private:
  double real() const;
  std::variant<int64_t, double, std::string> value_;
};

struct Field {
  std::string name;
  Value value;
  bool operator==(const Field&) const = default;
};

class Values {
 public:
  Values() = default;
  Values(std::initializer_list<Field> fields) : fields_(fields) {}
  // Parses {"name": value, ...}. Any other text gives no fields.
  static Values parse(const std::string& json);

  const Value& operator[](const std::string& name) const;  // requires that the field exists
  Value& operator[](const std::string& name);              // appends the field if it is missing
  void update(const Values& more);                         // sets or appends each field
  auto begin() const { return fields_.begin(); }
  auto end() const { return fields_.end(); }
  bool operator==(const Values&) const = default;
  std::string dump() const;

 private:
  std::vector<Field> fields_;
};

std::string dump(const std::vector<Values>& rows);  // [{...},{...}]

// Percentile p of a sample, or "" if fewer than 20 values lie beyond it: a P99 needs 2,000 values, a median 40. With
// fewer values the result would be one of the extremes and depend on their number. Experiments have no other way to a
// percentile (test_run.py checks this); with fewer values they report the mean.
Value percentile_seen(std::span<const double> sorted, double p);

}  // namespace xpyd::experiments
