// Admission by reservation (--reservation escrow): a prompt whose KV leaves goes to the engine when all that it needs
// is held, and until then it holds all of it or nothing. In three steps, WavePP's:
//   lease   its cached prefix, which is referenced and so is not evicted (KvMemory::reserve)
//   escrow  room for the rest of it here, a number that no admission counts on any more, for which nothing is evicted
//           yet (KvMemory::escrow); then, by push, its room at D (ReserveKv, whose answer is D's escrow)
//   commit  the engine has it, and draws from the escrow, block by block
// Each side's part has the lease that what is shared with a peer has (leases.h). One block table is for all ranks of an
// instance: what is held is held on all of them or on none.
//
// Nobody waits in a circle: P's part comes before D's, so who holds room at D waits for nobody here. Where D shares the
// pool its room is P's; by pull D hears of a prompt when it is computed; decode_first has D's room before: in all of
// these P's part is all that is held.
//
// Thread safety: the instance's thread.
#pragma once

#include <deque>
#include <unordered_map>

#include "batch/engine/engine.h"
#include "disagg/handover/attempts.h"
#include "disagg/handover/sender.h"

namespace xpyd::disagg::handover {

class Reservations {
 public:
  // `headroom`: tokens that are still to be computed here, of which no more is held for another prompt: so D's room
  // does not stand empty for long. One prompt can be longer than that.
  Reservations(InstanceParts& parts, Sender& sender, Engine& engine, int64_t headroom)
      : parts_(parts), sender_(sender), engine_(engine), headroom_(headroom) {}

  // The sender expects it.
  void start(SequencePtr sequence, DisaggOrder order, InstanceId decode);
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
    DisaggOrder order;
    InstanceId decode;
    bool held = false;  // here
  };

  bool is_over(Waiting& waiting);
  void end(Waiting& waiting, FinishReason reason, const std::string& error);
  bool hold(Waiting& waiting, bool alone);
  void let_go(Sequence& sequence);

  InstanceParts& parts_;
  Sender& sender_;
  Engine& engine_;
  const int64_t headroom_;
  std::deque<Waiting> waiting_;                      // by priority, then in turn
  std::unordered_map<InstanceId, int64_t> to_come_;  // of tick(): tokens that are held for, by their D
};

}  // namespace xpyd::disagg::handover
