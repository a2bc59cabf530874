// A hash of a row of floats that any number of threads computes alike, on the CPU and on CUDA: the sum modulo 2^64 of
// bijectively mixed (place, bits) of pairs. Rows that differ in one pair have different hashes. Rows that differ in
// more pairs have equal hashes with probability 2^-64.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace xpyd {

// A bijection of 64 bits (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
XPYD_HD constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The pairs of a row of n floats. If n is odd, the last pair's second float is +0.
XPYD_HD constexpr size_t n_row_hash_terms(size_t n) { return (n + 1) / 2; }
// The term that pair i adds to the row's hash.
XPYD_HD constexpr uint64_t row_hash_term(const float* row, size_t n, size_t i) {
  const uint64_t low = std::bit_cast<uint32_t>(row[2 * i]);
  const uint64_t high = 2 * i + 1 < n ? std::bit_cast<uint32_t>(row[2 * i + 1]) : 0;
  return mix64((low | high << 32) + (i + 1) * 0x9e3779b97f4a7c15u);
}

constexpr uint64_t row_hash(const float* row, size_t n) {
  uint64_t sum = 0;
  for (size_t i = 0; i < n_row_hash_terms(n); ++i) sum += row_hash_term(row, n, i);
  return sum;
}

// The hash of a sequence of rows, in order; before the first row it is 0.
constexpr uint64_t chain_hash(uint64_t before, uint64_t row) {
  return mix64(mix64(before + 0x9e3779b97f4a7c15u) + row);
}

}  // namespace xpyd
