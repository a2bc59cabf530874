// Counts what the sparse layers of one stage did, for Model::expert_load().
//
// Thread safety: any thread may make any call.
#pragma once

#include <algorithm>
#include <mutex>

#include "model/model.h"
#include "model/moe/moe.h"

namespace xpyd::model {

class ExpertMeter {
 public:
  // Adds one layer of one step. `whole`: tensor ranks hold whole experts.
  void add(const ExpertRows& rows, const ModelConfig& config, int tp, bool whole) {
    const int count = config.experts.count, total = rows.of(count - 1).end;
    std::lock_guard lock(mutex_);
    load_.rows.resize(size_t(count)), load_.rank_rows.resize(size_t(tp));
    for (int e = 0; e < count; ++e) load_.rows[size_t(e)] += rows.of(e).end - rows.of(e).begin;
    int most = 0, sum = 0;
    for (int r = 0; r < tp; ++r) {
      const Range own = rank_experts(count, r, tp);
      const int mine = !whole ? total : own.begin < own.end ? rows.of(own.end - 1).end - rows.of(own.begin).begin : 0;
      load_.rank_rows[size_t(r)] += mine;
      most = std::max(most, mine), sum += mine;
    }
    load_.layers += 1;
    load_.imbalance += double(most) * tp / sum;
    // Each rank reads the rows that others hold. A sliced row has a part on every rank.
    load_.exchanged_bytes += 4.0 * config.hidden * total * (tp - 1) * (whole ? 1 : tp);
  }
  void add_to(ExpertLoad& sum) const {
    std::lock_guard lock(mutex_);
    sum.add(load_);
  }

 private:
  mutable std::mutex mutex_;
  ExpertLoad load_;
};

}  // namespace xpyd::model
