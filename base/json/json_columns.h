// Structs as JSON and back, exactly. A struct is readable and writable if its members are listed once, in its
// namespace:
//
//   XPYD_COLUMNS(Struct, name, n)
//
// Zeros, false and empty lists are not written; a missing field is read as zero, false or empty. Unknown fields are
// ignored. Finite numbers come back equal.
//
// Thread safety: plain functions.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/json/json.h"

namespace xpyd {

template <class A, class Struct>
using Like = std::conditional_t<A::kReads, Struct, const Struct>;

// Calls a(NAME, s.NAME) for each name. A macro that names itself is expanded again when the result is scanned again.
#define XPYD_AGAIN(...) XPYD_AGAIN_16(XPYD_AGAIN_16(__VA_ARGS__))
#define XPYD_AGAIN_16(...) XPYD_AGAIN_4(XPYD_AGAIN_4(XPYD_AGAIN_4(XPYD_AGAIN_4(__VA_ARGS__))))
#define XPYD_AGAIN_4(...) XPYD_SCAN(XPYD_SCAN(XPYD_SCAN(XPYD_SCAN(__VA_ARGS__))))
#define XPYD_SCAN(...) __VA_ARGS__
#define XPYD_PARENTHESES ()
#define XPYD_COLUMN(name, ...) a(#name, s.name) __VA_OPT__(, XPYD_NEXT XPYD_PARENTHESES(__VA_ARGS__))
#define XPYD_NEXT() XPYD_COLUMN
#define XPYD_COLUMNS(Struct, ...)          \
  template <class A>                       \
  void columns(A& a, Like<A, Struct>& s) { \
    XPYD_AGAIN(XPYD_COLUMN(__VA_ARGS__));  \
  }

class JsonOut {
 public:
  static constexpr bool kReads = false;
  explicit JsonOut(JsonText& json) : json_(json) {}

  template <class T>
  void operator()(const char* name, const T& x) {
    if constexpr (requires { x.empty(); }) {
      if (x.empty()) return;
    } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      if (x == T{}) return;
    }
    json_.key(name);
    write(x);
  }
  template <class T>
  void write(const T& x) {
    if constexpr (std::is_enum_v<T>) {
      json_.value(int(x));
    } else if constexpr (std::is_arithmetic_v<T> || std::is_convertible_v<const T&, std::string_view>) {
      json_.value(x);
    } else if constexpr (requires { x.begin(); }) {
      json_.open('[');
      for (const auto& one : x) write(one);
      json_.close(']');
    } else {
      json_.open('{');
      columns(*this, x);
      json_.close('}');
    }
  }

 private:
  JsonText& json_;
};

// Throws nlohmann's exceptions if a value has another type. Memory of spans that it sets is kept in `keep`.
class JsonIn {
 public:
  static constexpr bool kReads = true;
  using Keep = std::vector<std::shared_ptr<void>>;
  JsonIn(const nlohmann::json& object, Keep& keep) : object_(object), keep_(keep) {}

  template <class T>
  void operator()(const char* name, T& x) {
    auto found = object_.find(name);
    if (found == object_.end()) {
      x = T{};
    } else {
      read(*found, x);
    }
  }
  template <class T>
  void read(const nlohmann::json& from, T& x) {
    if constexpr (std::is_enum_v<T>) {
      x = T(from.get<int>());
    } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
      x = from.get<T>();
    } else if constexpr (requires {
                           typename T::element_type;
                           x.subspan(0);
                         }) {
      auto list = std::make_shared<std::vector<std::remove_const_t<typename T::element_type>>>();
      read(from, *list);
      x = *list;
      keep_.push_back(std::move(list));
    } else if constexpr (requires { x.emplace_back(); }) {
      if (!from.is_array()) throw nlohmann::json::type_error::create(302, "type must be array", &from);
      for (const nlohmann::json& one : from) {
        x.emplace_back();
        read(one, x.back());
      }
    } else if constexpr (requires { x.fill(0); }) {
      for (size_t i = 0; i < x.size(); ++i) read(from.at(i), x[i]);
    } else {
      JsonIn in(from, keep_);
      columns(in, x);
    }
  }

 private:
  const nlohmann::json& object_;
  Keep& keep_;
};

}  // namespace xpyd
