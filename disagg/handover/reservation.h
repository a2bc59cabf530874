// Admission by reservation (--reservation escrow): a prompt whose KV leaves goes to the engine when all that it needs
// is held, and until then it holds all of it or nothing. In three steps, WavePP's:
//   lease   its cached prefix, which is referenced and so is not evicted (KvMemory::reserve)
//   escrow  room for the rest of it here, a number that no admission counts on any more, for which nothing is evicted
//           yet (KvMemory::escrow); then, by push, its room at D (ReserveKv, whose answer is D's escrow)
//   commit  the engine has it, and draws from the escrow, block by block
// Each side's part has the lease that what is shared with a peer has (leases.h). One block table is for all ranks of an
// instance: what is held is held on all of them or on none.
// Where D is not asked before the first step (kv_room.h), P's part is all that is held.
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
  // `headroom`: tokens that are still to be computed here, of which no more is held for another prompt: so D's room
  // does not stand empty for long. One prompt can be longer than that.
  Reservations(InstanceParts& parts, Sender& sender, const KvRoom& room, Engine& engine, int64_t headroom)
      : parts_(parts), sender_(sender), room_(room), engine_(engine), headroom_(headroom) {}

  // The sender expects it.
  void start(SequencePtr sequence, InstanceId decode);
  bool tick();  // true: something moved
  void clear(FinishReason reason, const std::string& error);

  int size() const { return int(waiting_.size()); }
  // f(request, handle) of each prompt that holds KV here.
  template <class F>
  void each_holder(F&& f) const {
    for (const Waiting& w : waiting_)
      if (w.sequence->kv != kNoKv) f(w.sequence->request->id, w.sequence->kv);
  }

 private:
  struct Waiting {
    SequencePtr sequence;  // null: it has gone
    InstanceId decode;
    bool held = false;  // here
  };

  bool is_over(Waiting& waiting);
  void end(Waiting& waiting, FinishReason reason, const std::string& error);

  InstanceParts& parts_;
  Sender& sender_;
  const KvRoom& room_;
  Engine& engine_;
  const int64_t headroom_;
  std::deque<Waiting> waiting_;                      // by priority, then in turn
  std::unordered_map<InstanceId, int64_t> to_come_;  // of tick(): tokens that are held for, by their D
};

}  // namespace xpyd::disagg::handover
