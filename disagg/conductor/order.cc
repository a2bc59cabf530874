#include "disagg/conductor/order.h"

#include "base/table.h"

namespace xpyd::disagg {
namespace {

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

std::span<const DisaggPolicy> disagg_policies() { return kOrders; }

const DisaggPolicy* find_disagg_policy(std::string_view name) { return find_row(kOrders, name); }

}  // namespace xpyd::disagg
