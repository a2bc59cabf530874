// What a conductor is told when it is made, and what its parts share.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "base/random.h"
#include "disagg/conductor/admission.h"
#include "disagg/conductor/order.h"
#include "disagg/conductor/placement.h"
#include "disagg/messages.h"
#include "disagg/pool/fetch_policy.h"
#include "disagg/pool/replication.h"
#include "model/cost/cost_model.h"

namespace xpyd::disagg {

class EventLog;

// What instances cost that have not been measured yet.
struct CostPrior {
  CostModel model;
  Rates rates;  // the machine's peaks
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
  Objectives objectives = {};             // of requests that have none; 0: none
  bool zero_copy = false;                 // the wire: nothing can be pulled
  int max_model_len = 0;                  // tokens: prompt and output together
  int64_t max_queue_bytes = 256ll << 20;  // queue_bytes() of requests that wait for their first step
  int prefill_window = 1;                 // decode_first: jobs that a prefill instance has not started yet
  int max_tries = 16;                     // attempts of one choice
  // Instances that may end in a row while they compute a choice, none of which got further than
  // crash_tokens with it; then it is what ends them. (Each attempt brings one or two: the prompt's
  // last logits give the first, maybe before another instance goes on.)
  int max_crashes = 2, crash_tokens = 4;
  double patience_s = 30;  // that a request waits for an instance to be there
  double lease_s = 0;      // an instance that is silent for so long is gone; 0: never
  uint64_t seed = 0;
  int step_tokens = 512;  // of one step
  StreamKv stream_kv = StreamKv::layer;
  bool escrow = false;  // InstanceOptions
  const FetchPolicy* fetch = find_fetch_policy("never");
  const ReplicationPolicy* replication = find_replication_policy("side_effect");
  double kv_bytes_scale = 1;     // of KV in the event log (a simulation's is small)
  double fetch_s_per_token = 0;  // of a prefix from another instance, until it is measured; 0: nobody fetches
  std::optional<CostPrior> prior = {};
  std::function<double(const Request&)> answer_tokens = {};  // that it will have; empty: nobody knows
  std::shared_ptr<EventLog> log = {};                        // null: none
};

// What all parts of one conductor work with.
struct ConductorContext {
  const ConductorOptions options;
  Clock& clock;
  Post& post;
  Random random;  // Policies draw from it, in the order of the decisions.
  ConductorStats totals = {};

  // What the client of this request wants: its own objectives, or else those of the options.
  Objectives objectives(const Request& request) const;
};

}  // namespace xpyd::disagg
