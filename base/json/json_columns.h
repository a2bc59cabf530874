// Structs as JSON, exactly. A struct is writable, and readable by experiments/event_log/json_in.h, if its members are
// listed once, in its namespace:
//
//   XPYD_COLUMNS(Struct, name, n)
//
// Zeros, false and empty lists are not written. Finite numbers come back equal.
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

}  // namespace xpyd
