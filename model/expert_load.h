// What the experts of a model have done, for metrics and the event log. Thread safety: a value.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace xpyd::model {

// The work of sparse layers so far (model/moe). A row is a token in one of its experts.
struct ExpertLoad {
  std::vector<int64_t> rows;       // [experts.count], over all layers; empty: the model has no experts
  std::vector<int64_t> rank_rows;  // [tp]: rows that a tensor rank computes whole or a slice of
  int64_t layers = 0;              // sparse layers of all steps
  double imbalance = 0;            // sum over these layers: rows of the busiest rank, divided by the mean of the ranks
  double exchanged_bytes = 0;      // of rows that ranks read from other ranks

  void add(const ExpertLoad& more) {
    const auto add_each = [](std::vector<int64_t>& to, const std::vector<int64_t>& from) {
      to.resize(std::max(to.size(), from.size()));
      for (size_t i = 0; i < from.size(); ++i) to[i] += from[i];
    };
    add_each(rows, more.rows), add_each(rank_rows, more.rank_rows);
    layers += more.layers, imbalance += more.imbalance, exchanged_bytes += more.exchanged_bytes;
  }
};

}  // namespace xpyd::model
