// Disaggregation policies decide the order of prefill and decode, which is one for a whole cluster
// (disagg/handover/kv_room.h says why), and for each request whether its prompt stays on the decode instance. They are
// pure functions of a snapshot. Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "disagg/messages.h"

namespace xpyd::disagg {

struct ClusterView;

struct DisaggOptions {
  bool pull = false;                      // if P computes first: D reads, instead of P writing
  int max_local_prefill_tokens = 1000;    // conditional_threshold 0.1: at most so many uncached tokens stay on D,
  int max_prefill_queue = 2;              // … and any prompt if at least so many jobs wait
  int min_remote_tokens = 2048;           // conditional_threshold 1.x: fewer uncached tokens than these stay,
  double min_remote_ratio = 0.7;          // … if they are a smaller share than this,
  int max_prefill_queued_tokens = 16384;  // … and any prompt if P has more uncached tokens than these to compute
  bool first_generation = true;           // conditional_threshold is Dynamo's of 0.1; false: of 1.x
  double append_tbt_weight = 1;           // append_cost: weight of the share of TBT against the share of TTFT
};

// One request, its decode instance D and its prefill instance P, as a policy sees them.
struct DisaggView {
  int tokens = 0;                     // to be computed or found
  int cached_decode = 0;              // of these, D has so many
  int cached_prefill = 0;             // of these, P has so many
  int prefill_jobs = 0;               // waiting in the global queue
  int64_t prefill_queued_tokens = 0;  // uncached, placed on P and not done
  int64_t decode_queued_tokens = 0;   // local prompts on D
  int decode_sequences = 0;           // decoding on D
  double decode_life_s = 0;           // mean duration of D's last decodes; 0: none has ended
  // Costs in seconds, measured, or predicted from the model and the machine. Only policies with `predicts` read them.
  double prefill_s_per_token = 0;  // on P
  double decode_s_per_token = 0;   // computing a prompt on D, beside its decodes
  double step_s = 0;               // a step of D without a prompt
  double kv_s_per_token = 0;       // transferring one token's KV
  double overlap = 0;              // overlap()
  int chunk_tokens = 512;
};

// Returns the share of a prompt's transfer that can overlap with its computation. The rest is the KV of the last chunk,
// or of this chunk's last layer (StreamKv::layer).
double overlap(StreamKv stream, bool pull, int n_layers, int tokens, int chunk_tokens);

struct DisaggPolicy {
  const char* name;
  DisaggOrder (*remote)(const DisaggOptions& options);                  // the order of all prompts that do not stay
  bool (*stays)(const DisaggView& view, const DisaggOptions& options);  // D computes this prompt; null: never
  bool predicts;                                                        // it reads the costs in seconds
  const char* source;
  // Returns the index of the decode instance that is asked before the one that placement has chosen; -1: none. If its
  // stays() is true, the request goes there. Null: only the chosen one is asked.
  int (*appends_at)(const ClusterView& view) = nullptr;
  DisaggOrder decide(const DisaggView& view, const DisaggOptions& options) const {
    return stays && stays(view, options) ? DisaggOrder::local : remote(options);
  }
};

std::span<const DisaggPolicy> disagg_policies();
const DisaggPolicy* find_disagg_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
