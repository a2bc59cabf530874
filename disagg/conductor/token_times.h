// The arrival times of one choice's tokens, and whether they keep the client's objectives. A request's TBT is the mean
// of the longest tenth of its gaps (Mooncake, FAST '25, section 5.1).
//
// Thread safety: a plain value.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "disagg/conductor/placement.h"

namespace xpyd::disagg {

struct TokenTimes {
  double first_s = -1, last_s = -1;  // Clock; negative: none yet
  std::vector<float> gaps;           // seconds between neighbouring tokens

  void token(double now_s) {
    if (first_s < 0)
      first_s = now_s;
    else
      gaps.push_back(float(now_s - last_s));
    last_s = now_s;
  }
  // Returns the request's TBT in seconds; 0 if there are fewer than two tokens.
  double worst_tenth() const {
    if (gaps.empty()) return 0;
    std::vector<float> longest = gaps;
    const auto n = long(std::ceil(double(longest.size()) / 10));
    std::nth_element(longest.begin(), longest.begin() + (n - 1), longest.end(), std::greater());
    return std::accumulate(longest.begin(), longest.begin() + n, 0.0) / double(n);
  }
  bool keeps(const Objectives& objectives, double arrival_s) const {
    return first_s >= 0 && first_s - arrival_s <= objectives.ttft_s && worst_tenth() <= objectives.tbt_s;
  }
};

}  // namespace xpyd::disagg
