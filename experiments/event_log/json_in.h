// Reads the structs that base/json/json_columns.h writes. A missing field is read as zero, false or empty. Unknown fields
// are ignored.
//
// Thread safety: plain functions.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "base/json/json_columns.h"

namespace xpyd {

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
