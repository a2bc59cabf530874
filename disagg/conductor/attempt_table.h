// The attempts under way: which instances compute which choices, and the load that is charged to these instances. A
// charge is taken back exactly once: when its part is done, or when the attempt is forgotten. When an instance ends,
// the table finds the attempts that this affects.
//
// The global prefill queue of `decode_first` (Dynamo's) is here, too: prompts whose KV blocks a decode instance has
// reserved, in order of arrival. A prefill instance takes the next prompt when it has begun the one before.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "disagg/conductor/cluster_state.h"
#include "disagg/conductor/request_table.h"

namespace xpyd::disagg {

struct Attempt {
  uint64_t request = 0;
  int first = 0, count = 1;  // choices of the request
  int left = 1;              // choices that have not ended
  DisaggOrder order = DisaggOrder::local;
  InstanceId prefill = -1, decode = -1;
  PlacedPrompt prompt;                     // charged to `prefill`
  int64_t context = 0;                     // tokens charged to `decode`
  double prompt_s = 0;                     // predicted duration of its prompt
  double joins_s = 0;                      // Clock: when decoding begins, or is predicted to
  bool queued = false, prompting = false;  // counted in queued_requests, in queued_tokens
};

class AttemptTable {
 public:
  AttemptTable(ConductorContext& context, ClusterState& cluster, RequestTable& requests)
      : context_(context), cluster_(cluster), requests_(requests) {}

  // Charges the attempt to its instances and returns its number. If `prefill` is -1, its prompt is charged to the
  // instance that takes its job.
  AttemptId add(const Attempt& attempt);
  // The prompt begins, so its prefill instance has room for another. Returns false if it had begun before.
  bool begin_prompt(Attempt& attempt);
  void uncharge_prompt(Attempt& attempt);  // the prompt is done; later calls do nothing
  void generated(Attempt& attempt);        // one of its choices has a new token
  void forget(AttemptId number);           // takes back the remaining charges
  void clear();

  // The global prefill queue. Requires: a decode instance holds room for the job's prompt.
  void add_job(PrefillJob job);
  void drop_job(AttemptId attempt);
  int jobs() const { return int(jobs_.size()); }
  // Gives jobs to the prefill instances that have room, and charges them. Requires: it is called when a prefill
  // instance has joined. The table calls it for all other reasons.
  void dispatch();

  Attempt* find(AttemptId number);
  Attempt& at(AttemptId number) { return attempts_.at(number); }
  const Attempt& at(AttemptId number) const { return attempts_.at(number); }
  // Returns whether no attempt is placed on the instance.
  bool idle(InstanceId id) const;

  // Returns whether the prefill instance has no part left: its tokens are here, and its KV is on the decode instance.
  bool handed_over(const Attempt& attempt) const;
  // Returns the attempts that end with the instance, sorted by number.
  std::vector<AttemptId> hit_by_end_of(InstanceId id) const;

 private:
  void charge_prompt(Attempt& attempt, Member& prefill);  // until uncharge_prompt()

  ConductorContext& context_;
  ClusterState& cluster_;
  RequestTable& requests_;
  AttemptId last_ = 0;
  std::unordered_map<AttemptId, Attempt> attempts_;
  std::deque<PrefillJob> jobs_;
};

}  // namespace xpyd::disagg
