// Leases holds the inbox of an instance and renews its leases. Whatever an instance and a peer share is valid only as
// long as the other side renews it (KvRenewed, and Report to the conductor), every quarter of a lease. A step may take
// longer than a lease. So the instance only records which attempts are valid, and a control thread, which computes
// nothing, sends the renewals. Sender and receiver check between steps whether their peers have renewed in time.
//
// Thread safety: any thread may call put(), mailbox() and renew(). The instance's thread calls the rest.
#pragma once

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mailbox.h"
#include "disagg/messages.h"

namespace xpyd::disagg::handover {

using SharedAttempts = std::unordered_map<InstanceId, std::vector<AttemptId>>;  // attempts shared with each peer

class Leases {
 public:
  // `lease_s` in seconds; 0: leases never end.
  Leases(double lease_s, Clock& clock) : lease_s_(lease_s), clock_(clock) {}

  // Puts a message into the inbox. An attempt that a peer asks about is renewed while its message is unread.
  void put(Envelope envelope);
  // Takes the new messages. They follow those that the caller has left in the inbox.
  std::vector<Envelope>& take();
  std::vector<Envelope>& inbox() { return inbox_; }
  // Takes only the grants (KvReserved) that have arrived during a step. Other messages wait for the next iteration of
  // the loop, and their attempts are renewed until then.
  std::vector<std::pair<InstanceId, KvReserved>> take_reserved();
  Mailbox<Envelope>& mailbox() { return mailbox_; }

  // update() records the attempts that are valid now and during the next step. add() adds one during that step.
  void update(SharedAttempts of_peer);
  void add(InstanceId peer, AttemptId attempt);
  // If a renewal is due, returns true and the attempts to renew. An instance whose loop has not begun an iteration for
  // kLongestTurnSeconds renews nothing. Attempts that have ended since update() are renewed, too, without effect.
  bool renew(SharedAttempts& of_peer);

 private:
  const double lease_s_;
  Clock& clock_;
  Mailbox<Envelope> mailbox_;
  std::vector<Envelope> inbox_;  // the instance's: taken, not handled yet
  std::mutex mutex_;             // guards the following members
  SharedAttempts shared_;
  std::vector<std::pair<InstanceId, AttemptId>> unread_;
  double updated_s_ = 0, renewed_s_ = 0;  // Clock: when each happened last
};

}  // namespace xpyd::disagg::handover
