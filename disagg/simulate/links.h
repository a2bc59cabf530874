// What the links between simulated instances carry, and when it has arrived. Each instance has a link out and a link
// in; whoever sends or receives several things at once shares it among them equally. A transfer moves at the smaller of
// its two shares (what it leaves unused there nobody takes: at most as good as max-min fairness).
//
// Thread safety: none; the timeline's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "disagg/simulate/timeline.h"

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
  struct Flow {
    int from, to;
    double left, rate = 0, since_s = 0, latency_s;
    std::optional<uint32_t> due;  // the timeline's: its end
    std::function<void()> arrived;
  };
  struct End {
    double bytes_per_s = 0;
    std::vector<Id> out, in;
  };
  void share_anew(int from, int to);
  void plan(Id id, Flow& flow);
  void end(Id id);

  Timeline& timeline_;
  std::vector<End> ends_;
  std::unordered_map<Id, Flow> flows_;
  Id last_ = 0;
  double bytes_ = 0;
};

}  // namespace xpyd::disagg
