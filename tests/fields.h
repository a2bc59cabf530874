// Every member of an aggregate, found by the compiler and listed by nobody. So a test of all fields notices a field
// that is added tomorrow.
#pragma once

#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

namespace xpyd::testing {

namespace fields_detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

// Stands for a value of any member's type. (An optional takes it by its own constructor.)
struct Anything {
  template <class T>
  requires(!is_optional<T>) operator T() const;  // NOLINT
};

template <class S, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { S{((void)I, Anything{})...}; };
}

template <class S, size_t N = 1>
constexpr size_t count() {
  if constexpr (!takes<S>(std::make_index_sequence<N>()))
    return N - 1;
  else
    return count<S, N + 1>();
}

template <class F, class... Members>
void visit(F& f, Members&... members) {
  (f(members), ...);
}

}  // namespace fields_detail

template <class S>
inline constexpr size_t n_fields = fields_detail::count<std::remove_cv_t<S>>();

// clang-format off
template <class S, class F>
void for_each_field(S& s, F&& f) {
  using fields_detail::visit;
  constexpr size_t n = n_fields<S>;
  if constexpr (n == 0) static_assert(std::is_empty_v<S>);
  else if constexpr (n == 1) { auto& [f0] = s; visit(f, f0); }
  else if constexpr (n == 2) { auto& [f0, f1] = s; visit(f, f0, f1); }
  else if constexpr (n == 3) { auto& [f0, f1, f2] = s; visit(f, f0, f1, f2); }
  else if constexpr (n == 4) { auto& [f0, f1, f2, f3] = s; visit(f, f0, f1, f2, f3); }
  else if constexpr (n == 5) { auto& [f0, f1, f2, f3, f4] = s; visit(f, f0, f1, f2, f3, f4); }
  else if constexpr (n == 6) { auto& [f0, f1, f2, f3, f4, f5] = s; visit(f, f0, f1, f2, f3, f4, f5); }
  else if constexpr (n == 7) { auto& [f0, f1, f2, f3, f4, f5, f6] = s; visit(f, f0, f1, f2, f3, f4, f5, f6); }
  else if constexpr (n == 8) { auto& [f0, f1, f2, f3, f4, f5, f6, f7] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7); }
  else if constexpr (n == 9) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8); }
  else if constexpr (n == 10) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9); }
  else if constexpr (n == 11) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10); }
  else if constexpr (n == 12) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11); }
  else if constexpr (n == 13) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12); }
  else if constexpr (n == 14) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13); }
  else if constexpr (n == 15) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14); }
  else if constexpr (n == 16) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15); }
  else if constexpr (n == 17) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16); }
  else if constexpr (n == 18) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17); }
  else if constexpr (n == 19) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18); }
  else if constexpr (n == 20) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19); }
  else if constexpr (n == 21) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20); }
  else if constexpr (n == 22) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21); }
  else if constexpr (n == 23) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22); }
  else if constexpr (n == 24) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23); }
  else if constexpr (n == 25) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24); }
  else if constexpr (n == 26) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25); }
  else if constexpr (n == 27) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26); }
  else if constexpr (n == 28) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27); }
  else if constexpr (n == 29) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27, f28] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27, f28); }
  else if constexpr (n == 30) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27, f28, f29] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27, f28, f29); }
  else if constexpr (n == 31) { auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27, f28, f29, f30] = s; visit(f, f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20, f21, f22, f23, f24, f25, f26, f27, f28, f29, f30); }
  else static_assert(n <= 31, "one more line here");
}
// clang-format on

}  // namespace xpyd::testing
