#include "disagg/conductor/placement.h"

#include <algorithm>

#include "base/table.h"
#include "disagg/conductor/placement_costs.h"

namespace xpyd::disagg {
namespace {

Placement random(const ClusterView& view, const PlacementOptions&) {
  return pair(view, any_of(view, prefills, view.random), any_of(view, decodes, view.random >> 32));
}

Placement round_robin(const ClusterView& view, const PlacementOptions&) {
  return pair(view, any_of(view, prefills, view.number), any_of(view, decodes, view.number));
}

// Decodes of a colocated instance delay its prompts, so a sequence counts as one token.
Placement least_loaded(const ClusterView& view, const PlacementOptions&) {
  return by(view, [](const InstanceView& i) { return double(i.queued_tokens) + i.sequences; });
}

// Cost: the tokens to compute before this prompt is done, which are those queued and its own uncached ones.
Placement prefix_aware(const ClusterView& view, const PlacementOptions&) {
  return by(view, [&](const InstanceView& i) { return double(i.queued_tokens) + i.sequences + uncached_of(view, i); });
}

// Lines 3 to 17 and 20 to 21 of Algorithm 1. The ratio in line 5 is infinite if this instance has no hit and another
// has one.
Placement mooncake(const ClusterView& view, const PlacementOptions& options) {
  const int holder = least(view, prefills, [](const InstanceView& i) { return -cached_of(i); });
  if (holder < 0) return {};
  const double best = cached_of(view.instances[size_t(holder)]);
  auto fetches = [&](const InstanceView& i) {
    return best > options.fetch_threshold * cached_of(i) && best > cached_of(i) && i.fetch_s < kNever;
  };
  Placement placed = by(
      view,
      [&](const InstanceView& i) { return i.queue_s + (fetches(i) ? i.fetch_s + i.fetched_prefill_s : i.prefill_s); },
      shortest_step);
  if (fetches(view.instances[size_t(placed.prefill)])) placed.source = holder;
  return placed;
}

// Without the + 1 an idle instance would cost 0 whatever its cache.
Placement lmetric(const ClusterView& view, const PlacementOptions&) {
  return by(view,
            [&](const InstanceView& i) { return (double(i.queued_tokens) + uncached_of(view, i)) * (i.load() + 1); });
}

Placement dynamo(const ClusterView& view, const PlacementOptions&) {
  const double block = view.block_tokens;
  auto decode_blocks = [&](const InstanceView& i) { return double(i.context_tokens + view.prompt_tokens) / block; };
  const int prefill = least(view, prefills, [&](const InstanceView& i) {
    const double credit = (i.cached_tokens + 0.75 * i.host_tokens + 0.25 * i.disk_tokens) / block;
    const double raw = double(i.queued_tokens + view.prompt_tokens) / block;
    return std::max(0.0, raw - credit) + (i.role == Role::colocated ? decode_blocks(i) : 0);
  });
  return pair(view, prefill, least(view, decodes, decode_blocks));
}

constexpr PlacementPolicy kPlacements[] = {
    {"random", random, false, "the baseline of Mooncake (FAST '25) section 5"},
    {"round_robin", round_robin, false, "vLLM's proxy examples"},
    {"least_loaded", least_loaded, false, "shortest queue; DistServe (OSDI '24) section 4.3"},
    {"prefix_aware", prefix_aware, false, "Mooncake (FAST '25) Algorithm 1 without transfer terms"},
    {"mooncake", mooncake, true, "Mooncake (FAST '25) Algorithm 1"},
    {"lmetric", lmetric, false, "LMetric (OSDI '26): (queued + uncached tokens) x (requests + 1)"},
    {"dynamo", dynamo, false, "Dynamo 1.x, kv-router selector"},
};

// ---- The order of prefill and decode.

DisaggOrder prefill_first(const DisaggOptions& o) { return o.pull ? DisaggOrder::pull : DisaggOrder::push; }

DisaggOrder decode_first(const DisaggOptions&) { return DisaggOrder::decode_first; }

// examples/llm/components/disagg_router.py
bool stays_below(const DisaggView& view, const DisaggOptions& o) {
  return view.tokens - view.cached_decode <= o.max_local_prefill_tokens || view.prefill_jobs >= o.max_prefill_queue;
}

// Mooncake: a prompt joins a decode batch if it needs no chunks and breaks no TBT objective.
bool joins_batch(const DisaggView& view, const DisaggOptions&) {
  return view.tbt_s < kNever && view.joined_step_s <= view.tbt_s;
}

constexpr DisaggPolicy kOrders[] = {
    {"prefill_first", prefill_first, nullptr, "DistServe, Mooncake, SGLang; with pull: vLLM with NIXL"},
    {"decode_first", decode_first, nullptr, "Dynamo's vLLM patch: a global prefill queue"},
    {"conditional_threshold", decode_first, stays_below, "Dynamo 0.1"},
    {"conditional_tbt", prefill_first, joins_batch, "Mooncake (arXiv 2407.00079): a short prompt joins D's batch"},
};

}  // namespace

std::span<const PlacementPolicy> placement_policies() { return kPlacements; }

const PlacementPolicy* find_placement_policy(std::string_view name) { return find_row(kPlacements, name); }

std::span<const DisaggPolicy> disagg_policies() { return kOrders; }

const DisaggPolicy* find_disagg_policy(std::string_view name) { return find_row(kOrders, name); }

}  // namespace xpyd::disagg
