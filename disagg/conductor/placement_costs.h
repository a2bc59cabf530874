// The parts that placement policies are made of: who is eligible, what an instance costs, and where the decode goes.
//
// Thread safety: plain functions.
#pragma once

#include <algorithm>

#include "disagg/conductor/placement.h"

namespace xpyd::disagg {

inline bool prefills(const InstanceView& i) { return i.role != Role::decode; }
inline bool decodes(const InstanceView& i) { return i.role == Role::decode; }

// Returns the eligible instance with the least cost, the first among equals, or -1 if none is eligible.
template <class Eligible, class Cost>
int least(const ClusterView& view, Eligible eligible, Cost cost) {
  int best = -1;
  double best_cost = 0;
  for (int i = 0; i < int(view.instances.size()); ++i) {
    const InstanceView& instance = view.instances[size_t(i)];
    if (!eligible(instance)) continue;
    const double c = cost(instance);
    if (best < 0 || c < best_cost) best = i, best_cost = c;
  }
  return best;
}

// Returns eligible instance number k mod n, where n is the number of eligible ones, or -1 if there are none.
template <class Eligible>
int any_of(const ClusterView& view, Eligible eligible, uint64_t k) {
  const auto n = uint64_t(std::ranges::count_if(view.instances, eligible));
  if (n == 0) return -1;
  k %= n;
  for (int i = 0;; ++i)
    if (eligible(view.instances[size_t(i)]) && k-- == 0) return i;
}

inline double cached_of(const InstanceView& i) { return i.cached_tokens; }
inline double uncached_of(const ClusterView& view, const InstanceView& i) {
  return double(view.prompt_tokens - i.cached_tokens);
}

// Policies that count place the decode on the instance with the fewest sequences.
inline int fewest_sequences(const ClusterView& view) {
  return least(view, decodes, [](const InstanceView& i) { return i.sequences; });
}
// Policies that predict take the shortest step with this request, among instances with room for its prompt if there are
// any.
inline int shortest_step(const ClusterView& view) {
  auto roomy = [&](const InstanceView& i) { return decodes(i) && i.available_tokens >= view.prompt_tokens; };
  auto step = [](const InstanceView& i) { return i.step_with_s; };
  const int best = least(view, roomy, step);
  return best >= 0 ? best : least(view, decodes, step);
}

inline Placement pair(const ClusterView& view, int prefill, int decode) {
  if (prefill >= 0 && view.instances[size_t(prefill)].role == Role::colocated) decode = prefill;
  return {prefill, decode};
}
template <class Cost>
Placement by(const ClusterView& view, Cost cost, int (*decode)(const ClusterView&) = fewest_sequences) {
  return pair(view, least(view, prefills, cost), decode(view));
}

}  // namespace xpyd::disagg
