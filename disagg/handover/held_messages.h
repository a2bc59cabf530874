// HeldMessages is a message bus that holds back the messages that a step sends to the conductor until the step's
// counters are published. A client that has its answer and then reads the metrics therefore finds the answer counted.
#pragma once

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "disagg/messages.h"

namespace xpyd::disagg {

// Thread safety: any thread calls send(), send_now() and has_answers(). Only the instance's thread calls the rest.
class HeldMessages final : public MessageBus {
 public:
  explicit HeldMessages(MessageBus& bus) : bus_(bus) {}

  // Starts to hold messages. From now on a message to the conductor waits here, and so does every message after it.
  // Otherwise a decode instance could report the second token to the conductor before the first one arrives there.
  // A ReserveKv never waits: D answers P alone, and P wants the answer while the step runs.
  void hold() {
    std::lock_guard lock(mutex_);
    holding_ = true;
  }
  // Returns whether a token that begins or ends a choice is being held.
  bool has_answers() {
    std::lock_guard lock(mutex_);
    for (const Held& held : held_)
      if (const auto* token = std::get_if<TokenOf>(&held.message);
          token && (token->index == 0 || token->event.finish != FinishReason::none))
        return true;
    return false;
  }
  // Ends hold(). If `first` is set, it is sent to the conductor. The held messages follow in order.
  void release(InstanceId from, std::optional<Message> first) {
    {
      std::lock_guard lock(mutex_);
      holding_ = false;
      released_.swap(held_);
    }
    if (first) bus_.send(from, kConductor, std::move(*first));
    for (Held& h : released_) bus_.send(h.from, h.to, std::move(h.message));
    released_.clear();
  }

  // Sends at once. Lease renewals use this, because a step may take longer than a lease.
  void send_now(InstanceId from, InstanceId to, Message message) { bus_.send(from, to, std::move(message)); }
  void send(InstanceId from, InstanceId to, Message message) override {
    {
      std::lock_guard lock(mutex_);
      const bool waits = to == kConductor || (!held_.empty() && !std::holds_alternative<ReserveKv>(message));
      if (holding_ && waits) {
        held_.push_back({from, to, std::move(message)});
        return;
      }
    }
    bus_.send(from, to, std::move(message));
  }

 private:
  struct Held {
    InstanceId from, to;
    Message message;
  };
  MessageBus& bus_;
  std::mutex mutex_;
  bool holding_ = false;        // guarded by mutex_
  std::vector<Held> held_;      // guarded by mutex_, in the order of send()
  std::vector<Held> released_;  // release()'s own, kept for its memory
};

}  // namespace xpyd::disagg
