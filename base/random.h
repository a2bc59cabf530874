// A small seeded generator (SplitMix64). Randomness is an argument. Integers and uniform() are equal on every machine;
// exponential() has the last bits of the machine's log1p().
//
// Thread safety: one thread.
#pragma once

#include <cmath>
#include <cstdint>

namespace xpyd {

class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return double(next() >> 11) * 0x1p-53; }             // [0, 1)
  uint64_t below(uint64_t n) { return uint64_t(uniform() * double(n)); }  // [0, n), n < 2^53
  double exponential() { return -std::log1p(-uniform()); }                // mean 1

 private:
  uint64_t state_;
};

}  // namespace xpyd
