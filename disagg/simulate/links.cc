#include "disagg/simulate/links.h"

#include <algorithm>

#include "base/status.h"

namespace xpyd::disagg {

void Links::set_rate(int end, double bytes_per_s) {
  if (size_t(end) >= ends_.size()) ends_.resize(size_t(end) + 1);
  ends_[size_t(end)].bytes_per_s = bytes_per_s;
}

int Links::busy(int end) const { return int(ends_[size_t(end)].out.size() + ends_[size_t(end)].in.size()); }

double Links::rate(int from, int to) const {
  const End &out = ends_[size_t(from)], &in = ends_[size_t(to)];
  return std::min(out.bytes_per_s / double(out.out.size() + 1), in.bytes_per_s / double(in.in.size() + 1));
}

Links::Id Links::send(int from, int to, double bytes, double latency_s, std::function<void()> arrived) {
  const Id id = ++last_;
  flows_[id] = {.from = from,
                .to = to,
                .left = bytes,
                .since_s = timeline_.now(),
                .latency_s = latency_s,
                .arrived = std::move(arrived)};
  ends_[size_t(from)].out.push_back(id);
  ends_[size_t(to)].in.push_back(id);
  bytes_ += bytes;
  share_anew(from, to);
  return id;
}

void Links::cancel(Id id) {
  auto found = flows_.find(id);
  if (found == flows_.end()) return;
  found->second.arrived = nullptr;
  end(id);
}

void Links::end(Id id) {
  auto found = flows_.find(id);
  Flow flow = std::move(found->second);
  flows_.erase(found);
  if (flow.due) timeline_.call_off(*flow.due);
  std::erase(ends_[size_t(flow.from)].out, id);
  std::erase(ends_[size_t(flow.to)].in, id);
  share_anew(flow.from, flow.to);
  if (flow.arrived) timeline_.at(timeline_.now() + flow.latency_s, std::move(flow.arrived));
}

// The shares at these two ends have changed, and nowhere else.
void Links::share_anew(int from, int to) {
  for (const std::vector<Id>* flows : {&ends_[size_t(from)].out, &ends_[size_t(to)].in})
    for (Id id : *flows) {
      Flow& flow = flows_.at(id);
      const End &out = ends_[size_t(flow.from)], &in = ends_[size_t(flow.to)];
      const double rate = std::min(out.bytes_per_s / double(out.out.size()), in.bytes_per_s / double(in.in.size()));
      if (rate == flow.rate) continue;
      flow.left = std::max(0.0, flow.left - flow.rate * (timeline_.now() - flow.since_s));
      flow.since_s = timeline_.now();
      flow.rate = rate;
      plan(id, flow);
    }
}

void Links::plan(Id id, Flow& flow) {
  if (flow.due) timeline_.call_off(*flow.due);
  flow.due = timeline_.at(flow.since_s + flow.left / flow.rate, [this, id] {
    flows_.at(id).due.reset();
    end(id);
  });
}

}  // namespace xpyd::disagg
