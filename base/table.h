// Rows of a table by name: whatever can be chosen here is a row of one.
//
// Thread safety: plain functions.
#pragma once

#include <iterator>
#include <string>
#include <string_view>

namespace xpyd {

template <class Rows>
auto find_row(const Rows& rows, std::string_view name) -> decltype(&*std::begin(rows)) {
  for (const auto& row : rows)
    if (name == row.name) return &row;
  return nullptr;
}

// "a, b, c"; for the choices of an option: "a|b|c"
template <class Rows>
std::string names_of(const Rows& rows, const char* between = ", ") {
  std::string names;
  for (const auto& row : rows) names += (names.empty() ? "" : between) + std::string(row.name);
  return names;
}

}  // namespace xpyd
