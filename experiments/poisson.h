// Poisson arrivals of requests whose lengths are uniform within half of their means.
#pragma once

#include <algorithm>

#include "base/random.h"
#include "experiments/simulated.h"

namespace xpyd::experiments {

inline disagg::Trace poisson(double rate, int n, int prompt, int output, uint64_t seed) {
  Random random(seed);
  disagg::Trace trace{.block_tokens = 64};
  const auto around = [&random](int tokens) { return std::max(2, int(tokens * (0.5 + random.uniform()))); };
  double now = 0;
  for (int i = 0; i < n; ++i) {
    now += random.exponential() / rate;
    const int tokens = around(prompt);
    add_request(trace, now, tokens, around(output));
  }
  return trace;
}

}  // namespace xpyd::experiments
