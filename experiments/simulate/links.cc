#include "experiments/simulate/links.h"

#include <algorithm>

namespace xpyd::disagg {

void Links::set_rate(int end, double bytes_per_s) {
  if (size_t(end) >= ends_.size()) ends_.resize(size_t(end) + 1);
  ends_[size_t(end)].bytes_per_s = bytes_per_s;
}

int Links::busy(int end) const { return ends_[size_t(end)].n_out + ends_[size_t(end)].n_in; }

double Links::rate(int from, int to) const {
  const End &out = ends_[size_t(from)], &in = ends_[size_t(to)];
  return std::min(out.bytes_per_s / (out.n_out + 1), in.bytes_per_s / (in.n_in + 1));
}

Links::Id Links::send(int from, int to, double bytes, double latency_s, std::function<void()> arrived) {
  const Id id = ++last_;
  End &out = ends_[size_t(from)], &in = ends_[size_t(to)];
  Pair& pair = pairs_[{from, to}];
  if (pair.flows.empty()) {
    pair = {.from = from, .to = to, .since_s = timeline_.now()};
    out.out.push_back(&pair), in.in.push_back(&pair);
  }
  ++out.n_out, ++in.n_in;
  pair.carry(timeline_.now());
  const double until = pair.each + bytes;
  pair.flows.emplace(until, id);
  flows_[id] = {&pair, until, latency_s, std::move(arrived)};
  bytes_ += bytes;
  share_anew(pair);
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
  Pair& pair = *flow.pair;
  End &out = ends_[size_t(pair.from)], &in = ends_[size_t(pair.to)];
  pair.flows.erase({flow.until, id});
  --out.n_out, --in.n_in;
  if (pair.flows.empty()) {
    if (pair.due) timeline_.call_off(*pair.due);
    std::erase(out.out, &pair), std::erase(in.in, &pair);
  }
  share_anew(pair);
  if (flow.arrived) timeline_.at(timeline_.now() + flow.latency_s, std::move(flow.arrived));
}

// A change on `changed` alters the shares at its two ends only.
void Links::share_anew(const Pair& changed) {
  for (const std::vector<Pair*>* pairs : {&ends_[size_t(changed.from)].out, &ends_[size_t(changed.to)].in})
    for (Pair* pair : *pairs) {
      const End &out = ends_[size_t(pair->from)], &in = ends_[size_t(pair->to)];
      const double rate = std::min(out.bytes_per_s / out.n_out, in.bytes_per_s / in.n_in);
      if (rate == pair->rate && pair != &changed) continue;
      pair->carry(timeline_.now());
      pair->rate = rate;
      plan(*pair);
    }
}

void Links::plan(Pair& pair) {
  if (pair.due) timeline_.call_off(*pair.due);
  const std::pair<double, Id> first = *pair.flows.begin();
  pair.due = timeline_.at(pair.since_s + (first.first - pair.each) / pair.rate, [this, &pair, first] {
    pair.due.reset();
    pair.each = first.first, pair.since_s = timeline_.now();
    end(first.second);
  });
}

}  // namespace xpyd::disagg
