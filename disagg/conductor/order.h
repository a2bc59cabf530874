// Disaggregation policies decide the order of prefill and decode, which is one for a whole cluster
// (disagg/handover/kv_room.h says why), and for each request whether its prompt stays on the decode instance. They are
// pure functions of a snapshot. Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "disagg/conductor/placement.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

struct DisaggOptions {
  bool pull = false;                    // if P computes first: D reads, instead of P writing
  int max_local_prefill_tokens = 1000;  // conditional_threshold: at most so many uncached tokens stay on D,
  int max_prefill_queue = 2;            // … and any prompt if at least so many jobs wait
};

// One request and its decode instance D, as a policy sees them.
struct DisaggView {
  int tokens = 0;         // to be computed or found
  int cached_decode = 0;  // of these, D has so many
  int prefill_jobs = 0;   // waiting in the global queue
  // Predicted seconds of a step of D that has the whole prompt beside its batch; kNever: one step does not hold it.
  double joined_step_s = kNever;
  double tbt_s = kNever;  // the request's objective; kNever: none
};

struct DisaggPolicy {
  const char* name;
  DisaggOrder (*remote)(const DisaggOptions& options);                  // the order of all prompts that do not stay
  bool (*stays)(const DisaggView& view, const DisaggOptions& options);  // D computes this prompt; null: never
  const char* source;
  DisaggOrder decide(const DisaggView& view, const DisaggOptions& options) const {
    return stays && stays(view, options) ? DisaggOrder::local : remote(options);
  }
};

std::span<const DisaggPolicy> disagg_policies();
const DisaggPolicy* find_disagg_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
