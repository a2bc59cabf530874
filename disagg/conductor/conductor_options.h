// The options of a conductor, and the context that its parts share.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <memory>
#include <optional>

#include "base/random.h"
#include "disagg/conductor/admission.h"
#include "disagg/conductor/placement.h"
#include "disagg/messages.h"
#include "disagg/pool/fetch_policy.h"
#include "model/cost/cost_model.h"

namespace xpyd::disagg {

class EventLog;

// The cost model of instances that have not been measured yet.
struct CostPrior {
  CostModel model;
  Rates rates;  // measured peaks of this machine
};

inline StepCost first_cost(const std::optional<CostPrior>& prior) {
  return prior ? StepCost(prior->model, prior->rates) : StepCost();
}

struct ConductorOptions {
  const PlacementPolicy* placement = nullptr;
  PlacementOptions placement_options;
  const DisaggPolicy* disagg = find_disagg_policy("prefill_first");
  DisaggOptions disagg_options;
  const AdmissionPolicy* admission = find_admission_policy("none");
  AdmissionOptions admission_options;
  Objectives objectives = {};  // of requests that have none of their own; 0: none
  bool zero_copy = false;      // the transport shares one pool, so nothing can be pulled
  int max_model_len = 0;       // tokens: prompt and output together
  int max_tries = 4;           // attempts for each choice of a request
  double patience_s = 30;      // how long a request waits for an instance to place it on
  double lease_s = 0;          // an instance that is silent for this long is removed; 0: never
  uint64_t seed = 0;
  int step_tokens = 512;  // token budget of one engine step
  StreamKv stream_kv = StreamKv::layer;
  bool reserve_blocks = false;  // see InstanceOptions
  int decode_copies = 1;  // decode instances that get a prompt's KV: one computes the answer, the others keep a copy
  const FetchPolicy* fetch = find_fetch_policy("never");
  double kv_bytes_scale = 1;     // factor on KV bytes in the event log (a simulation's KV is small)
  double fetch_s_per_token = 0;  // seconds to fetch one token's KV, until it is measured; 0: no fetches
  std::optional<CostPrior> prior = {};
  std::shared_ptr<EventLog> log = {};  // null: nothing is logged

  // Returns the order of all prompts that are not computed where they decode. It is a constant of the cluster.
  DisaggOrder remote_order() const {
    const DisaggOrder order = disagg->remote(disagg_options);
    return order == DisaggOrder::pull && zero_copy ? DisaggOrder::push : order;
  }
};

// The state that all parts of one conductor share.
struct ConductorContext {
  const ConductorOptions options;
  Clock& clock;
  MessageBus& bus;
  Random random;  // for policies; the order of decisions is the order of draws
  ConductorStats totals = {};

  // Returns the request's own objectives, or those of the options where it has none.
  Objectives objectives(const Request& request) const;
};

}  // namespace xpyd::disagg
