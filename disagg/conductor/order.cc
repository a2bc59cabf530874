#include "disagg/conductor/order.h"

#include <algorithm>

#include "base/table.h"
#include "disagg/conductor/placement.h"

namespace xpyd::disagg {
namespace {

DisaggOrder prefill_first(const DisaggOptions& o) { return o.pull ? DisaggOrder::pull : DisaggOrder::push; }

DisaggOrder decode_first(const DisaggOptions&) { return DisaggOrder::decode_first; }

DisaggOrder of_generation(const DisaggOptions& o) { return o.first_generation ? decode_first(o) : prefill_first(o); }

// 0.1: examples/llm/components/disagg_router.py. 1.x: conditional_disagg.rs, IslBounding or PrefillLoad.
bool stays_below(const DisaggView& view, const DisaggOptions& o) {
  if (o.first_generation)
    return view.tokens - view.cached_decode <= o.max_local_prefill_tokens || view.prefill_jobs >= o.max_prefill_queue;
  const int uncached = view.tokens - view.cached_decode;
  const bool little = uncached < o.min_remote_tokens && double(uncached) < o.min_remote_ratio * double(view.tokens);
  const bool busy = view.prefill_queued_tokens > o.max_prefill_queued_tokens;
  return little || busy;
}

// The predicted time until D's first token, if D computes the prompt and if P does.
struct Ways {
  double append_s;  // part of local_s: computing the prompt, which delays every sequence that decodes on D
  double local_s, remote_s;
};

Ways ways(const DisaggView& view) {
  const double local_tokens = double(view.tokens - view.cached_decode);
  const double remote_tokens = double(view.tokens - view.cached_prefill);
  const double chunks = local_tokens / double(std::max(1, view.chunk_tokens));
  const double append_s = local_tokens * view.decode_s_per_token;
  const double local_s = double(view.decode_queued_tokens) * view.decode_s_per_token + append_s + chunks * view.step_s;
  const double compute_s = remote_tokens * view.prefill_s_per_token;
  const double transfer_s = double(view.tokens - view.cached_decode) * view.kv_s_per_token;
  const double exposed_s = transfer_s - std::min(transfer_s * view.overlap, compute_s);
  const double remote_s = double(view.prefill_queued_tokens) * view.prefill_s_per_token + compute_s + exposed_s +
                          view.step_s;
  return {append_s, local_s, remote_s};
}

// A prompt on D is charged with the delay that it causes to every sequence that decodes there.
bool stays_by_cost(const DisaggView& view, const DisaggOptions&) {
  const Ways w = ways(view);
  return !(w.remote_s < w.local_s + view.decode_sequences * w.append_s);
}

// PPD's score (its code, ppd_decision_engine.py): the share of TTFT that computing the suffix on D saves, less the
// share that it adds to TBT there, times a weight (1 there). PPD looks both up in measurements of a whole load. Here
// they are predicted, TBT as if all such turns of conversations were computed on D: N decodes of duration L are N / L
// turns a second (Little's law), and each takes its computation from the time of D's decodes.
bool appends(const DisaggView& view, const DisaggOptions& o) {
  if (view.cached_decode == 0 || view.decode_life_s == 0) return false;  // not the next turn of a conversation
  const Ways w = ways(view);
  const double sooner = (w.remote_s - w.local_s) / w.remote_s;
  const double slower = view.decode_sequences * w.append_s / view.decode_life_s;
  return sooner > o.append_tbt_weight * slower;
}

// Returns the decode instance with room for the prompt that has most of it cached; among equals, with fewest sequences.
int nearest_decode(const ClusterView& view) {
  int best = -1;
  for (int i = 0; i < int(view.instances.size()); ++i) {
    const InstanceView& here = view.instances[size_t(i)];
    if (here.role != Role::decode || here.held_tokens() == 0 || here.available_tokens < view.prompt_tokens) continue;
    const InstanceView& there = view.instances[size_t(std::max(best, 0))];
    const int more = here.held_tokens() - there.held_tokens();
    if (best < 0 || more > 0 || (more == 0 && here.sequences < there.sequences)) best = i;
  }
  return best;
}

constexpr DisaggPolicy kOrders[] = {
    {"prefill_first", prefill_first, nullptr, false, "DistServe, Mooncake, SGLang; with pull: vLLM with NIXL"},
    {"decode_first", decode_first, nullptr, false, "Dynamo's vLLM patch: a global prefill queue"},
    {"conditional_threshold", of_generation, stays_below, false, "Dynamo 0.1 and 1.x"},
    {"conditional_cost", prefill_first, stays_by_cost, true, "remote if its first token comes sooner"},
    {"append_cost", prefill_first, appends, true, "PPD (2603.13358): later turns run where their KV is",
     nearest_decode},
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
