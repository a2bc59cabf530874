// When one choice's tokens came, and whether that kept what its client wanted (Mooncake, FAST '25 section 5.1: a
// request's TBT is the mean of its longest tenth of gaps).
//
// Thread safety: none; a value.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "disagg/conductor/placement.h"

namespace xpyd::disagg {

struct TokenTimes {
  double first_s = -1, last_s = -1;  // Clock; below 0: none yet
  std::vector<float> gaps;           // seconds between tokens, from the first on

  void token(double now_s) {
    if (first_s < 0)
      first_s = now_s;
    else
      gaps.push_back(float(now_s - last_s));
    last_s = now_s;
  }
  // Seconds; 0 of fewer than two tokens.
  double worst_tenth() const {
    if (gaps.empty()) return 0;
    std::vector<float> longest = gaps;
    const auto n = long(std::ceil(double(longest.size()) / 10));
    std::nth_element(longest.begin(), longest.begin() + (n - 1), longest.end(), std::greater());
    return std::accumulate(longest.begin(), longest.begin() + n, 0.0) / double(n);
  }
  double worst() const { return gaps.empty() ? 0 : *std::ranges::max_element(gaps); }
  bool keeps(const Objectives& objectives, double arrival_s) const {
    return first_s >= 0 && first_s - arrival_s <= objectives.ttft_s && worst_tenth() <= objectives.tbt_s;
  }
};

}  // namespace xpyd::disagg
