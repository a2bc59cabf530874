#include "disagg/placement.h"

#include <limits>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

bool prefills(const InstanceView& instance) { return instance.role != Role::decode; }
bool decodes(const InstanceView& instance) { return instance.role == Role::decode; }

// Index of the eligible instance with the lowest cost; the first among equals. -1: none.
template <class Eligible, class Cost>
int cheapest(const ClusterView& view, Eligible eligible, Cost cost) {
  int best = -1;
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < int(view.instances.size()); ++i) {
    const InstanceView& instance = view.instances[size_t(i)];
    if (!eligible(instance)) continue;
    int64_t c = cost(instance);
    if (best < 0 || c < best_cost) {
      best = i;
      best_cost = c;
    }
  }
  return best;
}

// The k-th eligible instance, k = random mod their number.
template <class Eligible>
int any_of(const ClusterView& view, Eligible eligible, uint64_t random) {
  uint64_t n = 0;
  for (const InstanceView& instance : view.instances) n += eligible(instance) ? 1 : 0;
  if (n == 0) return -1;
  uint64_t k = random % n;
  for (int i = 0;; ++i) {
    if (eligible(view.instances[size_t(i)]) && k-- == 0) return i;
  }
}

int64_t decode_load(const InstanceView& instance) { return instance.sequences; }

Placement with_decode(const ClusterView& view, int prefill, int decode) {
  if (prefill >= 0 && view.instances[size_t(prefill)].role == Role::colocated) decode = prefill;
  return {prefill, decode};
}

Placement place_random(const ClusterView& view) {
  return with_decode(view, any_of(view, prefills, view.random), any_of(view, decodes, view.random >> 32));
}

// A colocated instance's decodes delay its prompts too: one waiting sequence counts as one token.
Placement place_least_loaded(const ClusterView& view) {
  int prefill = cheapest(view, prefills, [](const InstanceView& i) { return i.queued_tokens + i.sequences; });
  return with_decode(view, prefill, cheapest(view, decodes, decode_load));
}

// Tokens that must be computed before this prompt is done: those queued before it and its uncached own.
Placement place_prefix_aware(const ClusterView& view) {
  int prefill = cheapest(view, prefills, [&](const InstanceView& i) {
    return i.queued_tokens + i.sequences + view.prompt_tokens - i.cached_tokens;
  });
  return with_decode(view, prefill, cheapest(view, decodes, decode_load));
}

constexpr PlacementPolicy kPlacements[] = {
    {"random", place_random, "the baseline of Mooncake (FAST '25) section 5"},
    {"least_loaded", place_least_loaded, "shortest queue; DistServe (OSDI '24) section 4.3"},
    {"prefix_aware", place_prefix_aware,
     "Mooncake (FAST '25) Algorithm 1 without transfer terms; SGLang's cache-aware router"},
};

}  // namespace

std::span<const PlacementPolicy> placement_policies() { return kPlacements; }

const PlacementPolicy* find_placement_policy(std::string_view name) { return find_row(kPlacements, name); }

}  // namespace xpyd::disagg
