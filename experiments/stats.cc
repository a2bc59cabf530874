#include "experiments/stats.h"

#include <algorithm>
#include <cmath>

#include "base/status.h"

namespace xpyd {

double percentile(std::span<const double> sorted, double p) {
  XPYD_CHECK(p >= 0 && p <= 100);
  if (sorted.empty()) return 0;
  double place = p / 100 * double(sorted.size() - 1);
  size_t below = std::min(size_t(place), sorted.size() - 1);
  size_t above = std::min(below + 1, sorted.size() - 1);
  double t = place - double(below), a = sorted[below], b = sorted[above];
  // numpy's lerp: from the nearer end, so that t = 1 gives b exactly.
  return t < 0.5 ? a + (b - a) * t : b - (b - a) * (1 - t);
}

Summary summarize(std::vector<double> values) {
  Summary s;
  if (values.empty()) return s;
  std::sort(values.begin(), values.end());
  s.count = int64_t(values.size());
  for (double x : values) s.mean += x;
  s.mean /= double(values.size());
  for (double x : values) s.std += (x - s.mean) * (x - s.mean);
  s.std = std::sqrt(s.std / double(values.size()));
  s.min = values.front();
  s.max = values.back();
  s.median = percentile(values, 50);
  s.p90 = percentile(values, 90);
  s.p95 = percentile(values, 95);
  s.p99 = percentile(values, 99);
  return s;
}

}  // namespace xpyd
