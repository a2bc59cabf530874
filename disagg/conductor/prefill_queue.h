// The global prefill queue of `decode_first` (Dynamo's): prompts whose KV blocks a decode instance has reserved, in
// order of arrival. A prefill instance takes the next prompt when it has begun the one before.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>

#include "disagg/conductor/attempt_table.h"

namespace xpyd::disagg {

class PrefillQueue {
 public:
  PrefillQueue(ConductorContext& context, ClusterState& cluster, AttemptTable& attempts)
      : context_(context), cluster_(cluster), attempts_(attempts) {}

  // Requires: a decode instance holds room for the prompt. dispatch() must follow.
  void add(PrefillJob job) { jobs_.push_back(std::move(job)); }
  void remove(AttemptId attempt) {
    std::erase_if(jobs_, [attempt](const PrefillJob& job) { return job.attempt == attempt; });
  }
  void clear() { jobs_.clear(); }
  // Gives jobs to the prefill instances that have room, and charges them. Requires: it is called when a prefill
  // instance has joined or has begun a prompt, and when a job was added.
  void dispatch() {
    while (!jobs_.empty()) {
      Member* best = nullptr;
      for (auto& [id, member] : cluster_.members()) {
        if (member.draining || member.info.role != Role::prefill || member.load.queued_requests > 0) continue;
        if (!best || member.load.queued_tokens < best->load.queued_tokens) best = &member;
      }
      if (!best) return;
      PrefillJob job = std::move(jobs_.front());
      jobs_.pop_front();
      Attempt* const attempt = attempts_.find(job.attempt);
      if (!attempt) continue;
      attempts_.charge_prompt(*attempt, *best);
      context_.bus.send(kConductor, attempt->prefill, std::move(job));
    }
  }
  int size() const { return int(jobs_.size()); }

 private:
  ConductorContext& context_;
  ClusterState& cluster_;
  AttemptTable& attempts_;
  std::deque<PrefillJob> jobs_;
};

}  // namespace xpyd::disagg
