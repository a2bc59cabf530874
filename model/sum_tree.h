// The fixed binary tree over K-group sums. Leaves 0..G-1 are paired level by level,
// left to right; a last leaf without a partner moves up unchanged. For G a power of two, an aligned
// power-of-two range of leaves is a subtree: a tensor-parallel rank sums its own groups, and
// `tree_sum` over the ranks gives the bits of the unsharded sum.
#pragma once

#include <bit>
#include <cstddef>

namespace xpyd {

inline constexpr int kMaxGroups = 64;

// Buffers that TreeStack needs for `n_groups` leaves.
constexpr int tree_depth(int n_groups) { return std::bit_width(unsigned(n_groups - 1)) + 1; }

// The tree one leaf at a time, for a producer that makes leaves in order. Leaf g is written to
// buffer `slot(g)`; then for each of `merges(g)` times, buffer top-1 += buffer top, going down from
// slot(g). After the last leaf the remaining buffers collapse the same way onto buffer 0.
struct TreeStack {
  static constexpr int slot(int g) { return std::popcount(unsigned(g)); }
  static constexpr int merges(int g, bool last) {
    return last ? slot(g) : std::countr_one(unsigned(g));
  }
};

// parts[0][i] = tree over parts[0..n_parts)[i] for i in [0, n). The other parts are overwritten.
inline void tree_sum(float* const* parts, int n_parts, size_t n) {
  for (int step = 1; step < n_parts; step *= 2)
    for (int left = 0; left + step < n_parts; left += 2 * step)
      for (size_t i = 0; i < n; ++i) parts[left][i] += parts[left + step][i];
}

}  // namespace xpyd
