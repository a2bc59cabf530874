// What the links between simulated instances carry, and when it has arrived. Each instance has a link out and a link
// in; whoever sends or receives several things at once shares it among them equally. A transfer moves at the smaller of
// its two shares (what it leaves unused there nobody takes: at most as good as max-min fairness).
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

  // `end` numbers instances from 0; bytes/s each way.
  void set_rate(int end, double bytes_per_s);
  // `arrived` is called when all bytes and then `latency_s` have passed.
  Id send(int from, int to, double bytes, double latency_s, std::function<void()> arrived);
  void cancel(Id id);  // it never arrives; one that has, or is unknown, stays as it is

  double bytes() const { return bytes_; }  // sent in all
  int busy(int end) const;                 // transfers out of it and into it now
  double rate(int from, int to) const;     // that one more would have

 private:
  // Transfers from one instance to another have the same share at each moment, so which of them ends first does not
  // depend on what their shares will be: its end alone is planned, and a change of shares costs nothing for the others.
  struct Pair {
    int from = 0, to = 0;
    double rate = 0, since_s = 0;
    double each = 0;                        // bytes that each has got by since_s, since the first of them began
    std::set<std::pair<double, Id>> flows;  // by what `each` is at their ends
    std::optional<uint32_t> due = {};       // the timeline's: the first end
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
  std::map<std::pair<int, int>, Pair> pairs_;  // from, to
  std::unordered_map<Id, Flow> flows_;
  Id last_ = 0;
  double bytes_ = 0;
};

}  // namespace xpyd::disagg
