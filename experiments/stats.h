// Statistics of a sample: mean, spread, and percentiles as numpy computes them.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xpyd {

// Percentile p in [0, 100] of `sorted` (ascending), linear between neighbours as in numpy's default. Returns 0 for an
// empty sample.
double percentile(std::span<const double> sorted, double p);

struct Summary {
  int64_t count = 0;
  double mean = 0;
  double std = 0;  // of the population (numpy's default, ddof = 0)
  double min = 0, median = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};

// All fields are 0 for an empty sample.
Summary summarize(std::vector<double> values);

}  // namespace xpyd
