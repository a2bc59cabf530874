// Where an attempt goes: which instances serve it, which part of its prefix is fetched, whether it is refused, and in
// which order prefill and decode share it. Each step builds the view that its policy sees (placement.h, fetch_policy.h,
// admission.h, order.h, replication.h), asks the policy, logs its answer, and writes it into the plan. Nothing is
// charged here.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "disagg/conductor/attempt_table.h"
#include "disagg/pool/directory.h"

namespace xpyd::disagg {

// One attempt while it is decided. It lives shorter than the scoreboard's next look.
struct AttemptPlan {
  // Of choices [first, first + count), while so many jobs wait in the global prefill queue.
  AttemptPlan(const RequestTable::Entry& entry, int first, int count, int prefill_jobs);
  AttemptPlan(const AttemptPlan&) = delete;
  AttemptPlan& operator=(const AttemptPlan&) = delete;

  const RequestTable::Choice& choice() const { return entry.choices[size_t(attempt.first)]; }
  const InstanceView& at_prefill() const { return seen.instances[size_t(placed.prefill)]; }
  const InstanceView& at_decode() const { return seen.instances[size_t(placed.decode)]; }
  // Tokens that the prefill instance will not have to compute.
  int held_tokens() const { return fetches ? fetch.view.holder_tokens : at_prefill().held_tokens(); }

  const RequestTable::Entry& entry;
  Attempt attempt;  // as far as it is decided
  const int prefill_jobs;
  std::vector<int32_t> joined;      // prompt and output, where there is output
  std::span<const int32_t> tokens;  // to be computed or found
  PromptHashes prompt;
  // choose()
  ClusterView seen;
  Placement placed;
  std::optional<DisaggOrder> ordered;  // the order, where it is known already
  // decide_fetch()
  Scoreboard::Fetch fetch;
  bool fetches = false;
  ReplicationView heat;
  double fetch_s = 0, ttft_s = 0;  // predicted
  // decide_copies()
  bool keep = true;
};

class Planner {
 public:
  Planner(ConductorContext& context, ClusterState& cluster, const RequestTable& requests, const AttemptTable& attempts)
      : context_(context), cluster_(cluster), requests_(requests), attempts_(attempts) {}

  // Chooses the prefill instance and the decode instance. False: there is nobody.
  bool choose(AttemptPlan& plan);
  // Decides whether the prefill instance gets a part of the prefix from others, and predicts the first token's time.
  void decide_fetch(AttemptPlan& plan);
  // Decides on arrival, before anything is computed. A request that was tried before is taken.
  Refusal refuses(const AttemptPlan& plan);
  // Decides the order, and so where the prompt is computed and how much of it is found there.
  void decide_order(AttemptPlan& plan);
  // Names the instance that a fetch is charged to, and decides whether the fetched prefix stays for others.
  void decide_copies(AttemptPlan& plan);

  // Decides when the prompt is done. An attempt whose client has a token already is taken.
  Refusal refuses_late(const Attempt& attempt);

 private:
  void choose_append(AttemptPlan& plan);
  DisaggOrder order_at(AttemptPlan& plan, int decode);
  void add_costs(DisaggView& view, const InstanceStats& prefill, const InstanceStats& decode,
                 const KvShape& shape) const;
  void count_reads(AttemptPlan& plan);
  ClusterAdmission look_at(const RequestTable::Entry& entry, InstanceId decode, double ttft_s);
  void foresee(const Member& member);
  InstanceId id_of(int instance) const { return cluster_.board().ids()[size_t(instance)]; }

  ConductorContext& context_;
  ClusterState& cluster_;
  const RequestTable& requests_;
  const AttemptTable& attempts_;
  std::optional<PrefixHeat> heat_;  // where --replication asks for it
  // Of the last look_at(), whose view points to them.
  StepCost decode_cost_;
  std::vector<DecodeView> decoding_, coming_;
};

}  // namespace xpyd::disagg
