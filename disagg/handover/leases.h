// The mail and the leases of an instance: what stands here and at its peers is believed as long as somebody says that
// it does (KvRenewed, and Report to the conductor), every quarter of a lease. A step may take longer than a lease, so
// the instance only tells what stands, and a thread of control, which computes nothing, says it. (Whether a peer has
// said so in time is judged by sender and receiver, between steps.)
//
// Thread safety: put(), mail() and renew() from any thread; the rest from the instance's.
#pragma once

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mailbox.h"
#include "disagg/messages.h"

namespace xpyd::disagg::handover {

using SharedAttempts = std::unordered_map<InstanceId, std::vector<AttemptId>>;  // at each peer, too

class Leases {
 public:
  // `lease_s`: 0: nothing ever ends by itself.
  Leases(double lease_s, Clock& clock) : lease_s_(lease_s), clock_(clock) {}

  // What a peer asks for stands while it lies unread.
  void put(Envelope envelope);
  // What has come, behind what was left there.
  std::vector<Envelope>& take();
  std::vector<Envelope>& inbox() { return inbox_; }
  // Room that was promised meanwhile. What else has come is for the next turn, and stands until then.
  std::vector<std::pair<InstanceId, KvReserved>> take_reserved();
  Mailbox<Envelope>& mail() { return mail_; }

  // What is true now, and will be while a step takes its time; and what comes to it in that step.
  void update(SharedAttempts of_peer);
  void add(InstanceId peer, AttemptId attempt);
  // What is to be said now, if it is time. Nothing of an instance that stands in one step for
  // kLongestTurnSeconds. Of what has ended since nobody knows.
  bool renew(SharedAttempts& of_peer);

 private:
  const double lease_s_;
  Clock& clock_;
  Mailbox<Envelope> mail_;
  std::vector<Envelope> inbox_;  // the instance's: taken, not handled
  std::mutex mutex_;             // guards what follows
  SharedAttempts shared_;
  std::vector<std::pair<InstanceId, AttemptId>> unread_;
  double updated_s_ = 0, renewed_s_ = 0;  // Clock: the last time
};

}  // namespace xpyd::disagg::handover
