// Statistics of a sample: mean, spread, percentiles as numpy computes them, a text histogram.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace xpyd {

// Percentile p in [0, 100] of `sorted` (ascending): numpy's default, linear between neighbours.
// An empty sample has none: 0.
double percentile(std::span<const double> sorted, double p);

struct Summary {
  int64_t count = 0;
  double mean = 0;
  double std = 0;  // of the population (numpy's default, ddof = 0)
  double min = 0, median = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};

// All fields 0 for an empty sample.
Summary summarize(std::vector<double> values);

// Counts of values in equal bins over [low, high]; values outside go to the first or last bin.
// Before: bins >= 1, low < high.
std::vector<int64_t> histogram(std::span<const double> values, double low, double high, int bins);

// One character per bin, the tallest bin "█", an empty one " ": "▁▂█▃ ".
std::string sparkline(std::span<const int64_t> counts);

}  // namespace xpyd
