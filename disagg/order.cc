#include "disagg/order.h"

#include <algorithm>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

DisaggOrder remote(const DisaggOptions& options) { return options.pull ? DisaggOrder::pull : DisaggOrder::push; }

DisaggOrder prefill_first(const DisaggView&, const DisaggOptions& options) { return remote(options); }

DisaggOrder decode_first(const DisaggView&, const DisaggOptions&) { return DisaggOrder::decode_first; }

// 0.1: examples/llm/components/disagg_router.py. 1.x: conditional_disagg.rs, IslBounding or
// PrefillLoad.
DisaggOrder conditional_threshold(const DisaggView& view, const DisaggOptions& o) {
  if (o.first_generation) {
    const bool far = view.tokens - view.cached_decode > o.max_local_prefill_tokens &&
                     view.prefill_jobs < o.max_prefill_queue;
    return far ? DisaggOrder::decode_first : DisaggOrder::local;
  }
  const int uncached = view.tokens - view.cached_decode;
  const bool little = uncached < o.min_remote_tokens && double(uncached) < o.min_remote_ratio * double(view.tokens);
  const bool busy = view.prefill_queued_tokens > o.max_prefill_queued_tokens;
  return little || busy ? DisaggOrder::local : remote(o);
}

// The first token's time either way; what a local prompt costs those who decode there is charged to
// it: each chunk delays every one of them.
DisaggOrder conditional_cost(const DisaggView& view, const DisaggOptions& o) {
  const double local_tokens = double(view.tokens - view.cached_decode);
  const double remote_tokens = double(view.tokens - view.cached_prefill);
  const double chunks = local_tokens / double(std::max(1, view.chunk_tokens));
  const double local_s = double(view.decode_queued_tokens) * view.decode_s_per_token +
                         local_tokens * view.decode_s_per_token + chunks * view.step_s;
  const double damage_s = double(view.decode_sequences) * local_tokens * view.decode_s_per_token;
  const double compute_s = remote_tokens * view.prefill_s_per_token;
  const double transfer_s = double(view.tokens - view.cached_decode) * view.kv_s_per_token;
  const double exposed_s = transfer_s - std::min(transfer_s * view.overlap, compute_s);
  const double remote_s = double(view.prefill_queued_tokens) * view.prefill_s_per_token + compute_s + exposed_s +
                          view.step_s;
  return remote_s < local_s + damage_s ? remote(o) : DisaggOrder::local;
}

constexpr DisaggPolicy kOrders[] = {
    {"prefill_first", prefill_first, false, false, "DistServe, Mooncake, SGLang; pull: vLLM with NIXL"},
    {"decode_first", decode_first, true, false, "Dynamo's vLLM patch: a global prefill queue"},
    {"conditional_threshold", conditional_threshold, true, true, "Dynamo 0.1 and 1.x"},
    {"conditional_cost", conditional_cost, false, true, "remote where its first token comes sooner"},
};

}  // namespace

double overlap(StreamKv stream, bool pull, int n_layers, int tokens, int chunk_tokens) {
  if (pull || stream == StreamKv::request) return 0;
  const double last = std::min(1.0, double(chunk_tokens) / std::max(1, tokens));
  return 1 - (stream == StreamKv::layer ? last / n_layers : last);
}

std::span<const DisaggPolicy> disagg_policies() { return kOrders; }

const DisaggPolicy* find_disagg_policy(std::string_view name) { return find_row(kOrders, name); }

}  // namespace xpyd::disagg
