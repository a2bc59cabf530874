// Any one of the control messages, and whom it is from and for.
//
// Files that only pass messages on need no more than messages.h, which names Message.
#pragma once

#include <variant>

#include "disagg/messages.h"

namespace xpyd::disagg {

// Its copies, moves and end are in envelope.cc: for so many kinds they take a compiler a while.
struct Message
    : std::variant<StartRequest, AbortAttempt, PeerJoined, PeerGone, TokenOf, AttemptProgress, AttemptFailed, Report,
                   PrefillJob, ReserveKv, KvReserved, KvDelivered, ReservationCancelled, KvOffered, KvTaken, KvRenewed,
                   PeerBroken, ClearPrefixCache, Welcome, Retire, JoinRequest, Joined, LeaveRequest, CacheReport> {
  using variant::variant;
  Message();
  Message(const Message&);
  Message(Message&&) noexcept;
  Message& operator=(const Message&);
  Message& operator=(Message&&) noexcept;
  ~Message();
};

struct Envelope {
  InstanceId from = kConductor, to = kConductor;
  Message message;
};

}  // namespace xpyd::disagg
