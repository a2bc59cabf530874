// One message of each kind with every member set.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "disagg/messages.h"
#include "tests/fields.h"

namespace xpyd::testing {

inline constexpr double kSender = 5000, kReceiver = 123.5;  // "now" by the clocks of both sides

// Sets every member to a value that is not its default, all different as far as types allow.
class Filler {
 public:
  template <class T>
  void operator()(T& x) {
    int next = ++counter_;
    if constexpr (std::is_same_v<T, bool>) {
      x = !x;
    } else if constexpr (std::is_same_v<T, float>) {
      x = 0.5f + float(next);
    } else if constexpr (std::is_same_v<T, double>) {
      x = kSender - next - 0.25;
    } else if constexpr (std::is_enum_v<T>) {
      x = T(1);
    } else if constexpr (std::is_same_v<T, int>) {
      x = next;
    } else if constexpr (std::is_integral_v<T>) {
      x = T(0x1122334455660000) + T(next);
    } else if constexpr (std::is_same_v<T, std::string>) {
      x = "text " + std::to_string(next) + " é";
    } else if constexpr (requires { x.push_back({}); }) {
      x.resize(size_t(2 + next % 3));
      for (auto& element : x) (*this)(element);
    } else if constexpr (fields_detail::is_optional<T>) {
      (*this)(x.emplace());
    } else if constexpr (requires { x.use_count(); }) {
      auto made = std::make_shared<std::remove_const_t<typename T::element_type>>();
      (*this)(*made);
      x = made;
    } else {
      for_each_field(x, *this);
    }
  }

 private:
  int counter_ = 0;
};

template <size_t I = 0, class F>
void for_each_kind(F f) {
  if constexpr (I < std::variant_size_v<Message>) {
    f(std::in_place_index<I>);
    for_each_kind<I + 1>(f);
  }
}

// One message of each kind, with every field set.
inline std::vector<Message> full_messages() {
  std::vector<Message> messages;
  for_each_kind([&]<size_t I>(std::in_place_index_t<I>) {
    Message message;
    auto& m = message.emplace<I>();
    Filler filler;
    filler(m);
    messages.push_back(std::move(message));
  });
  return messages;
}

}  // namespace xpyd::testing
