// Rows of a table by name. Every choice of this program is a row of a table.
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

// The names of all rows: "a, b, c", or "a|b|c" for the choices of an option.
template <class Rows>
std::string names_of(const Rows& rows, const char* between = ", ") {
  std::string names;
  for (const auto& row : rows) names += (names.empty() ? "" : between) + std::string(row.name);
  return names;
}

}  // namespace xpyd
