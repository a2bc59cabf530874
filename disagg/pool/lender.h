// The holder's side of a fetch (README.md). It pins and leases a prefix until the reader says that it is done, or falls
// silent. The part in offload tiers is loaded first. The holder compares tokens, so prefixes with equal hashes cost a
// refusal and never a wrong token.
//
// Thread safety: the instance's thread.
#pragma once

#include <vector>

#include "disagg/handover/attempts.h"
#include "disagg/handover/leases.h"

namespace xpyd::disagg::pool {

class Lender {
 public:
  explicit Lender(InstanceParts& parts) : parts_(parts) {}

  void handle(InstanceId from, FetchKv message);
  void handle(InstanceId from, const FetchOver& message);
  void renewed(InstanceId from, AttemptId attempt);
  void peer_gone(InstanceId peer);
  bool tick();   // returns whether something moved
  void clear();  // readers are not told

  bool empty() const { return lent_.empty(); }
  bool counts() const { return waits_ > 0; }  // true: a registration is being closed
  // Calls f(request, handle) for each KV that is being read. `request` is 0: only the reader knows it.
  template <class F>
  void each_holder(F&& f) const {
    for (const Lent& lent : lent_)
      if (lent.kv != kNoKv) f(uint64_t(0), lent.kv);
  }

 private:
  struct Lent {
    InstanceId to = -1;
    AttemptId attempt = 0;
    int begin = 0, end = 0;  // tokens requested
    KvHandle kv = kNoKv;
    RemoteKey registration;
    bool answered = false, over = false;
    double deadline_s = 0;  // Clock: lease of a reader that says nothing
  };
  Lent* find(InstanceId to, AttemptId attempt);
  void answer(Lent& lent);
  bool give_back(Lent& lent);

  InstanceParts& parts_;
  std::vector<Lent> lent_;
  int waits_ = 0;
};

}  // namespace xpyd::disagg::pool
