// Transfers between simulated instances, and when they arrive. Each instance has an outgoing and an incoming link. The
// transfers on a link share it equally. A transfer moves at the smaller of its two shares. No other transfer takes the
// unused rest, so the result is at most as good as max-min fairness. Rates are bytes/s, times seconds.
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "experiments/simulate/timeline.h"

namespace xpyd::disagg {

class Links {
 public:
  using Id = uint64_t;
  explicit Links(Timeline& timeline) : timeline_(timeline) {}

  // `end` is an instance, numbered from 0. The rate holds for each direction.
  void set_rate(int end, double bytes_per_s);
  // Calls `arrived` when all bytes have been sent and `latency_s` has passed after that.
  Id send(int from, int to, double bytes, double latency_s, std::function<void()> arrived);
  void cancel(Id id);  // the transfer never arrives; no effect if it has arrived or is unknown

  double bytes() const { return bytes_; }  // sum over all transfers begun
  int busy(int end) const;                 // transfers that leave or enter `end` now
  double rate(int from, int to) const;     // bytes/s that one more transfer would get

 private:
  // The transfers from one instance to another. They have the same share at each moment, so the order of their ends
  // does not depend on future shares. Only the first end is on the timeline, and a change of shares costs nothing for
  // the other transfers.
  struct Pair {
    int from = 0, to = 0;
    double rate = 0, since_s = 0;
    double each = 0;  // bytes that each transfer has got by since_s, counted from the start of the first of them
    std::set<std::pair<double, Id>> flows;  // ordered by the value of `each` at which a transfer ends
    std::optional<uint32_t> due = {};       // the timeline's slot of the first end
    void carry(double now) { each += rate * (now - std::exchange(since_s, now)); }
  };
  struct Flow {
    Pair* pair;
    double until, latency_s;
    std::function<void()> arrived;
  };
  struct End {
    double bytes_per_s = 0;
    int n_out = 0, n_in = 0;  // transfers
    std::vector<Pair*> out, in;
  };
  void share_anew(const Pair& changed);
  void plan(Pair& pair);
  void end(Id id);

  Timeline& timeline_;
  std::vector<End> ends_;
  std::map<std::pair<int, int>, Pair> pairs_;  // by (from, to)
  std::unordered_map<Id, Flow> flows_;
  Id last_ = 0;
  double bytes_ = 0;
};

}  // namespace xpyd::disagg
