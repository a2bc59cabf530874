// Disaggregation policies decide in which order prefill and decode share requests, which is a constant of the cluster
// (disagg/handover/kv_room.h says why), and which requests stay with one instance. They are pure functions of a
// snapshot.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "disagg/messages.h"

namespace xpyd::disagg {

struct ClusterView;

struct DisaggOptions {
  bool pull = false;                      // prefill_first: D reads the KV
  int max_local_prefill_tokens = 1000;    // conditional_threshold, decode_first: longer prompts are remote
  int max_prefill_queue = 2;              // … if fewer jobs than this wait
  int min_remote_tokens = 2048;           // conditional_threshold, prefill_first: prompts with fewer uncached
  double min_remote_ratio = 0.7;          // … tokens and a smaller uncached share than this stay local
  int max_prefill_queued_tokens = 16384;  // …, and so does every prompt if P has more queued than this
  bool first_generation = true;           // conditional_threshold: the rule of Dynamo 0.1, not of 1.x
  double append_tbt_weight = 1;           // append_cost: weight of TBT beside TTFT
};

// What a policy sees of one request, its decode instance and its prefill instance.
struct DisaggView {
  int tokens = 0;                     // to be computed or found
  int cached_decode = 0;              // of them, on D
  int cached_prefill = 0;             // of them, on P
  int prefill_jobs = 0;               // waiting in the global queue
  int64_t prefill_queued_tokens = 0;  // uncached, placed on P and not done
  int64_t decode_queued_tokens = 0;   // local prompts on D
  int decode_sequences = 0;           // decoding on D
  double decode_life_s = 0;           // mean duration of D's last decodes, from joining to the end; 0: none
  // Predictions in seconds, for policies that set `predicts`.
  double prefill_s_per_token = 0;  // on P
  double decode_s_per_token = 0;   // computing a prompt on D, beside its decodes
  double step_s = 0;               // of D, without a prompt
  double kv_s_per_token = 0;       // by the transport
  double overlap = 0;              // overlap()
  int chunk_tokens = 512;
};

// Returns the share of a prompt's transfer that can overlap with the prompt's computation: all but the KV that the last
// computation produces.
double overlap(StreamKv stream, bool pull, int n_layers, int tokens, int chunk_tokens);

struct DisaggPolicy {
  const char* name;
  DisaggOrder (*remote)(const DisaggOptions& options);                  // the order of all prompts that do not stay
  bool (*stays)(const DisaggView& view, const DisaggOptions& options);  // D computes the prompt too; null: none stays
  bool predicts;                                                        // it reads the predictions
  const char* source;
  // Returns the index of the decode instance that is asked first. A request whose prompt it would compute itself goes
  // there, whatever placement says. -1: none; null: placement alone chooses.
  int (*appends_at)(const ClusterView& view) = nullptr;
  DisaggOrder decide(const DisaggView& view, const DisaggOptions& options) const {
    return stays && stays(view, options) ? DisaggOrder::local : remote(options);
  }
};

std::span<const DisaggPolicy> disagg_policies();
const DisaggPolicy* find_disagg_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
