// The holder's side of a fetch (README.md): a prefix that another instance will read, pinned and leased until it says
// that it has, or falls silent. What its tiers have of it is loaded first. The tokens are compared here, so equal
// hashes of unequal prefixes cost an answer, not a wrong token.
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
  bool tick();   // true: something moved
  void clear();  // the readers find out by themselves

  bool empty() const { return lent_.empty(); }
  bool counts() const { return waits_ > 0; }  // a window is being closed
  // f(request, handle): whose KV is read; the request is the reader's affair.
  template <class F>
  void each_holder(F&& f) const {
    for (const Lent& lent : lent_)
      if (lent.kv != kNoKv) f(uint64_t(0), lent.kv);
  }

 private:
  struct Lent {
    InstanceId to = -1;
    AttemptId attempt = 0;
    int begin = 0, end = 0;  // tokens that were asked for
    KvHandle kv = kNoKv;
    WindowKey window;
    bool answered = false, over = false;
    double deadline_s = 0;  // Clock: without a word of the reader
  };
  Lent* find(InstanceId to, AttemptId attempt);
  void answer(Lent& lent);
  bool give_back(Lent& lent);

  InstanceParts& parts_;
  std::vector<Lent> lent_;
  int waits_ = 0;
};

}  // namespace xpyd::disagg::pool
