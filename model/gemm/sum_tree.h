// The fixed binary tree over K-group sums. Leaves 0..G-1 are paired level by level, from left to right; a last leaf
// without a partner moves up unchanged. If G is a power of two, an aligned power-of-two range of leaves is a subtree. A
// tensor-parallel rank then sums its own groups, and the tree over ranks gives the bits of the unsharded sum.
#pragma once

#include <bit>

namespace xpyd::model {

inline constexpr int kMaxGroups = 64;

// Number of buffers that TreeStack needs for `n_groups` leaves.
constexpr int tree_depth(int n_groups) { return std::bit_width(unsigned(n_groups - 1)) + 1; }

// Evaluates the tree for a producer that makes leaves in order. Leaf g is written to buffer slot(g). Then, merges(g)
// times, buffer top - 1 += buffer top, with top going down from slot(g). After the last leaf, the remaining buffers
// collapse in the same way onto buffer 0.
struct TreeStack {
  static constexpr int slot(int g) { return std::popcount(unsigned(g)); }
  static constexpr int merges(int g, bool last) { return last ? slot(g) : std::countr_one(unsigned(g)); }
};

}  // namespace xpyd::model
