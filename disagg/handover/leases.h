// The leases of an instance: what stands here and at its peers is believed as long as somebody says that it does
// (KvRenewed, and Report to the conductor), every quarter of a lease. A step may take longer than a lease, so the
// instance only tells what stands, and a thread of control, which computes nothing, says it.
//
// Thread safety: put() and renew() from any thread; take() and update() from the instance's.
#pragma once

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mailbox.h"
#include "disagg/messages.h"

namespace xpyd::disagg {}

namespace xpyd::disagg::handover {

using Standing = std::unordered_map<InstanceId, std::vector<AttemptId>>;  // at each peer, too

class Leases {
 public:
  // `lease_s`: 0: nothing ever ends by itself.
  Leases(double lease_s, Clock& clock);
  ~Leases();

  // The instance's mail. What a peer asks for stands while it lies unread.
  void put(Envelope envelope);
  void take(std::vector<Envelope>& inbox);
  Mailbox<Envelope>& mail() { return mail_; }

  // What is true now, and will be while a step takes its time. `inbox`: taken, not handled.
  void update(Standing of_peer, const std::vector<Envelope>& inbox);
  // What is to be said now, if it is time. Nothing of an instance that stands in one step for
  // kLongestTurnSeconds. Of what has ended since nobody knows.
  bool renew(Standing& of_peer);

 private:
  const double lease_s_;
  Clock& clock_;
  Mailbox<Envelope> mail_;
  std::mutex mutex_;  // guards what follows
  Standing standing_;
  std::vector<std::pair<InstanceId, AttemptId>> unread_;
  double stood_s_ = 0, renewed_s_ = 0;  // Clock: the last time
};

}  // namespace xpyd::disagg::handover
