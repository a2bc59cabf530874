// KvExchange groups the parts of an instance that exchange KV with others. Each part takes the messages for which it
// declares a handle().
//
// Thread safety: the instance's thread.
#pragma once

#include <string>
#include <utility>

#include "disagg/handover/attempts.h"
#include "disagg/handover/kv_room.h"
#include "disagg/handover/receiver.h"
#include "disagg/handover/reservation.h"
#include "disagg/handover/sender.h"
#include "disagg/pool/fetcher.h"
#include "disagg/pool/lender.h"

namespace xpyd::disagg {

// Gives the message to each of `parts` that has a handle() for its type. If several have one, all must take it by const
// reference, because the first would move from it.
template <class M, class... Parts>
void hand_to(InstanceId from, M&& message, Parts&... parts) {
  const auto one = [&](auto& part) {
    if constexpr (requires { part.handle(from, std::forward<M>(message)); })
      part.handle(from, std::forward<M>(message));
  };
  (one(parts), ...);
}

struct KvExchange {
  Attempts attempts;
  handover::Sender& sender;  // owned by the instance; also the engine's hooks
  handover::KvRoom room;
  handover::Receiver receiver;
  handover::Reservations reservations;
  pool::Fetcher fetcher;
  pool::Lender lender;

  template <class M>
  void handle(InstanceId from, M message) {
    hand_to(from, std::move(message), attempts, sender, receiver, fetcher, lender);
  }
  void handle(InstanceId from, KvRenewed message) {
    for (AttemptId attempt : message.attempts)
      sender.renewed(from, attempt), receiver.renewed(from, attempt), lender.renewed(from, attempt);
  }
  void peer_gone(InstanceId peer) {
    sender.peer_gone(peer), receiver.peer_gone(peer), fetcher.peer_gone(peer), lender.peer_gone(peer);
  }
  bool tick() {  // returns whether something moved
    bool moved = sender.tick();
    moved |= receiver.tick();
    moved |= fetcher.tick();
    moved |= lender.tick();
    moved |= reservations.tick();
    return moved;
  }
  void clear(FinishReason reason, const std::string& error) {
    reservations.clear(reason, error), fetcher.clear(reason, error, attempts), lender.clear();
    sender.clear(reason, error), receiver.clear(reason, error);
  }

  bool empty() const {
    return reservations.size() == 0 && sender.empty() && receiver.empty() && fetcher.empty() && lender.empty();
  }
  // Returns whether transfers must be polled, because no message announces their end.
  bool counts() const { return receiver.counts() || fetcher.counts() || lender.counts(); }
  // Returns the attempts here that peers hold, too.
  handover::SharedAttempts shared() const {
    handover::SharedAttempts of_peer;
    sender.add_shared(of_peer), receiver.add_shared(of_peer), fetcher.add_shared(of_peer);
    return of_peer;
  }
  // Calls f(request, handle) for each sequence that holds KV here outside the engine.
  template <class F>
  void each_holder(const F& f) const {
    reservations.each_holder(f), sender.each_holder(f), receiver.each_holder(f);
    fetcher.each_holder(f), lender.each_holder(f);
  }
};

}  // namespace xpyd::disagg
