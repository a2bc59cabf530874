// Plans one attempt: which instances serve it, which part of its prefix is fetched, whether it is refused, and in which
// order prefill and decode run. Each step builds the view that its policy reads (placement.h, fetch_policy.h,
// admission.h), asks the policy, logs the answer, and writes it into the plan. No step charges anything.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "disagg/conductor/attempt_table.h"
#include "disagg/pool/directory.h"

namespace xpyd::disagg {

// One attempt while it is planned. It is valid until the scoreboard's next look().
struct AttemptPlan {
  // Plans choices [first, first + count). `prefill_jobs` is the length of the global prefill queue.
  AttemptPlan(const RequestTable::Entry& entry, int first, int count, int prefill_jobs);
  AttemptPlan(const AttemptPlan&) = delete;
  AttemptPlan& operator=(const AttemptPlan&) = delete;

  const RequestTable::Choice& choice() const { return entry.choices[size_t(attempt.first)]; }
  const InstanceView& at_prefill() const { return seen.instances[size_t(placed.prefill)]; }
  const InstanceView& at_decode() const { return seen.instances[size_t(placed.decode)]; }

  const RequestTable::Entry& entry;
  Attempt attempt;  // as far as it is planned
  const int prefill_jobs;
  std::vector<int32_t> joined;      // prompt and output; empty if there is no output
  std::span<const int32_t> tokens;  // what must be computed or found in a cache
  PromptHashes prompt;
  // Set by choose().
  ClusterView seen;
  Placement placed;
  // Set by decide_fetch().
  Scoreboard::Fetch fetch;
  bool fetches = false;
  double fetch_s = 0, ttft_s = 0;  // predicted
};

class Planner {
 public:
  Planner(ConductorContext& context, ClusterState& cluster, const RequestTable& requests, const AttemptTable& attempts)
      : context_(context), cluster_(cluster), requests_(requests), attempts_(attempts) {}

  // Chooses the prefill instance and the decode instance. Returns false if there are none.
  bool choose(AttemptPlan& plan);
  // Decides whether the prefill instance fetches a part of the prefix from others, and predicts the TTFT.
  void decide_fetch(AttemptPlan& plan);
  // Decides on arrival, before anything is computed. A retry is never refused.
  Refusal refuses(const AttemptPlan& plan);
  // Decides the order, and thereby which instance computes the prompt and how much of it is cached there.
  void decide_order(AttemptPlan& plan);
  // Returns what the instance that begins the attempt is told.
  StartRequest message(const AttemptPlan& plan, AttemptId number) const;

  // Decides when the prompt is done. A request whose client has a token already is never refused.
  Refusal refuses_late(const Attempt& attempt);

 private:
  ClusterAdmission look_at(const RequestTable::Entry& entry, InstanceId decode, double ttft_s);
  InstanceId id_of(int instance) const { return cluster_.board().ids()[size_t(instance)]; }

  ConductorContext& context_;
  ClusterState& cluster_;
  const RequestTable& requests_;
  const AttemptTable& attempts_;
  // The view of the last look_at() points to these.
  StepCost decode_cost_;
  std::vector<DecodeView> decoding_, coming_;
};

}  // namespace xpyd::disagg
