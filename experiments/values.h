// What an experiment is asked and what it answers: named numbers and words, in the order of their
// columns. As text they are JSON objects.
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

template <class T>  // what a number comes from and goes to; `char` is none
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

  // To read a word as a number, or the other way, is a bug of the experiment.
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
  // {"name": value, ...}; whatever else the text is, no fields.
  static Values parse(const std::string& json);

  const Value& operator[](const std::string& name) const;  // must be there
  Value& operator[](const std::string& name);              // appended where it is not
  void update(const Values& more);                         // sets or appends each
  auto begin() const { return fields_.begin(); }
  auto end() const { return fields_.end(); }
  bool operator==(const Values&) const = default;
  std::string dump() const;

 private:
  std::vector<Field> fields_;
};

std::string dump(const std::vector<Values>& rows);  // [{...},{...}]

// Percentile p of a sample, or "" where fewer than 20 of it lie beyond: a P99 wants 2,000, a median
// 40. What few samples call a percentile is one of them, and which depends on how many there are.
// Experiments have no other way to a percentile (test_run.py looks); of fewer they give the mean.
Value percentile_seen(std::span<const double> sorted, double p);

}  // namespace xpyd::experiments
