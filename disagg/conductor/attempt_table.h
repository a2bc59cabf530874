// The attempts under way: who computes which choices, and what that is charged to. A charge is taken back exactly once,
// when its part is done or when the attempt is forgotten. When an instance ends, the table says which attempts that
// hits, and which request may be the cause.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <unordered_map>
#include <vector>

#include "disagg/conductor/cluster_state.h"
#include "disagg/conductor/request_table.h"

namespace xpyd::disagg {

struct Attempt {
  uint64_t request = 0;
  int first = 0, count = 1;  // choices
  int left = 1;              // of them, not ended
  DisaggOrder order = DisaggOrder::local;
  InstanceId prefill = -1, decode = -1;
  PlacedPrompt prompt;     // charged to `prefill`
  int64_t context = 0;     // tokens charged to `decode`
  double prompt_s = 0;     // that its prompt was said to take
  InstanceId lender = -1;  // charged for its prefix:
  double lends_s = 0;
  double joins_s = 0;                      // Clock: it decodes, or was said to begin to
  bool queued = false, prompting = false;  // charged: queued_requests, queued_tokens
  bool asked = false;                      // decode_first: its PrefillJob has come
};

class AttemptTable {
 public:
  AttemptTable(ConductorContext& context, ClusterState& cluster, RequestTable& requests)
      : context_(context), cluster_(cluster), requests_(requests) {}

  // Charges the attempt to its instances, and returns its number. With `prefill` -1 its prompt is charged later.
  AttemptId add(const Attempt& attempt);
  void charge_prompt(Attempt& attempt, Member& prefill);
  // The prompt begins, so its prefill instance has room for another one. False: it has begun before.
  bool begin_prompt(Attempt& attempt);
  void uncharge_prompt(Attempt& attempt);  // The prompt is done. Later calls do nothing.
  void generated(Attempt& attempt);        // another token of one of its choices
  // Takes back what is still charged. True: its prompt had not begun, so its prefill instance has room for another one.
  [[nodiscard]] bool forget(AttemptId number);
  void clear();

  Attempt* find(AttemptId number);
  Attempt& at(AttemptId number) { return attempts_.at(number); }
  const Attempt& at(AttemptId number) const { return attempts_.at(number); }
  // True: nothing is placed on the instance.
  bool idle(InstanceId id) const;

  // True: nothing more can come of the prefill instance. Its tokens are here, and its KV is on the decode instance.
  bool handed_over(const Attempt& attempt) const;
  // Returns the attempts that end with the instance, in an order that is the same on every machine.
  std::vector<AttemptId> hit_by_end_of(InstanceId id) const;
  // An instance has ended in the middle of these attempts, and nobody knows whose turn it was. A request that alone has
  // ended several instances is the cause. Several such requests are suspects: they are tried again one after the other,
  // until each has got on or is the only one that it can have been.
  void blame(InstanceId id, const std::vector<AttemptId>& attempts);
  bool suspect(uint64_t request, int choice) const;
  bool suspect_runs() const;

 private:
  bool computes(InstanceId id, const Attempt& attempt) const;
  void uncharge_lender(Attempt& attempt);

  ConductorContext& context_;
  ClusterState& cluster_;
  RequestTable& requests_;
  AttemptId last_ = 0;
  std::unordered_map<AttemptId, Attempt> attempts_;
};

}  // namespace xpyd::disagg
