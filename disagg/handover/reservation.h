// Admission by reservation (--reservation escrow): a prompt whose KV leaves enters the engine when all that it needs is
// held. Until then it holds all of it or nothing. The three steps are WavePP's (sections 4.2 to 4.5):
//   lease    The cached prefix is referenced, so it is not evicted (KvMemory::reserve).
//   reserve  (WavePP's escrow) Blocks for the rest are reserved here as a number (KvMemory::reserve_blocks): nobody
//            else gets them, and cached blocks stay findable meanwhile. With push, D is then asked for its room
//            (ReserveKv).
//   commit   The engine takes the prompt, whose appends draw on the reserved blocks and evict.
// Each side renews its part as it renews all that it shares with a peer (leases.h). All ranks of an instance share one
// block table, so room is held on all ranks or on none. If D is not asked before the first step (kv_room.h), only P's
// part is held.
//
// Thread safety: the instance's thread.
#pragma once

#include <deque>
#include <unordered_map>

#include "batch/engine/engine.h"
#include "disagg/handover/attempts.h"
#include "disagg/handover/kv_room.h"
#include "disagg/handover/sender.h"

namespace xpyd::disagg::handover {

class Reservations {
 public:
  // `headroom`: if the engine, and the prompts that hold room for a D, have more tokens than these to compute, the next
  // prompt for this D waits. So D's room does not stay empty for long. A single prompt may be longer.
  Reservations(InstanceParts& parts, Sender& sender, const KvRoom& room, Engine& engine, int64_t headroom)
      : parts_(parts), sender_(sender), room_(room), engine_(engine), headroom_(headroom) {}

  // Requires: Sender::expect() was called for the attempt.
  void start(SequencePtr sequence, InstanceId decode);
  bool tick();  // returns whether something moved
  void clear(FinishReason reason, const std::string& error);

  int size() const { return int(waiting_.size()); }
  // Calls f(request, handle) for each prompt that holds KV here.
  template <class F>
  void each_holder(F&& f) const {
    for (const Waiting& w : waiting_)
      if (w.sequence->kv != kNoKv) f(w.sequence->request->id, w.sequence->kv);
  }

 private:
  struct Waiting {
    SequencePtr sequence;  // null: it has left
    InstanceId decode;
    bool held = false;  // all of P's part
  };

  bool is_over(Waiting& waiting);
  void end(Waiting& waiting, FinishReason reason, const std::string& error);

  InstanceParts& parts_;
  Sender& sender_;
  const KvRoom& room_;
  Engine& engine_;
  const int64_t headroom_;
  std::deque<Waiting> waiting_;                      // by priority, then by arrival
  std::unordered_map<InstanceId, int64_t> to_come_;  // in tick(): tokens that are still to be computed for each D
};

}  // namespace xpyd::disagg::handover
