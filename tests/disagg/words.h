// All members of any value, found by the compiler (tests/fields.h), as words of a text, and back.
#pragma once

#include <iomanip>
#include <istream>
#include <ostream>
#include <string>

#include "tests/fields.h"

namespace xpyd::testing {

struct Put {
  std::ostream& out;
  template <class T>
  void operator()(const T& x) const {
    if constexpr (std::is_same_v<T, std::string>) {
      out << std::quoted(x) << ' ';
    } else if constexpr (std::is_enum_v<T>) {
      out << int(x) << ' ';
    } else if constexpr (std::is_arithmetic_v<T>) {
      out << +x << ' ';
    } else if constexpr (requires { x.begin(); }) {
      (*this)(x.size());
      for (const auto& element : x) (*this)(element);
    } else if constexpr (fields_detail::is_optional<T> || requires { x.use_count(); }) {
      (*this)(bool(x));
      if (x) (*this)(*x);
    } else {
      for_each_field(x, *this);
    }
  }
};

// For values without optional parts.
struct Take {
  std::istream& in;
  template <class T>
  void operator()(T& x) const {
    if constexpr (std::is_same_v<T, std::string>) {
      in >> std::quoted(x);
    } else if constexpr (std::is_enum_v<T>) {
      int number = 0;
      in >> number;
      x = T(number);
    } else if constexpr (std::is_arithmetic_v<T>) {
      in >> x;
    } else if constexpr (requires { x.begin(); }) {
      size_t n = 0;
      in >> n;
      x.resize(n);
      for (auto& element : x) (*this)(element);
    } else {
      for_each_field(x, *this);
    }
  }
};

}  // namespace xpyd::testing
