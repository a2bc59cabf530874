// Messages to the conductor that a step has caused leave when the step's counters can be read: a client that has its
// answer, and then asks for the metrics, finds the answer counted.
#pragma once

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "disagg/messages.h"

namespace xpyd::disagg {

// Thread safety: any thread; hold() and release() are the instance's own.
class HeldMessages final : public MessageBus {
 public:
  explicit HeldMessages(MessageBus& bus) : bus_(bus) {}

  // From now on a message to the conductor waits here, and so do all that are sent behind it: a decode instance that
  // hears of a prompt's KV could otherwise tell the conductor of the second token before the first one is there.
  void hold() {
    std::lock_guard lock(mutex_);
    holding_ = true;
  }
  // A token that begins or ends a choice is among those that wait.
  bool has_answers() {
    std::lock_guard lock(mutex_);
    for (const Held& held : held_)
      if (const auto* token = std::get_if<TokenOf>(&held.message);
          token && (token->index == 0 || token->event.finish != FinishReason::none))
        return true;
    return false;
  }
  // Ends hold(): `first`, where there is one, leaves for the conductor, and then all that has waited.
  void release(InstanceId from, std::optional<Message> first) {
    std::vector<Held> held;
    {
      std::lock_guard lock(mutex_);
      holding_ = false;
      held.swap(held_);
    }
    if (first) bus_.send(from, kConductor, std::move(*first));
    for (Held& h : held) bus_.send(h.from, h.to, std::move(h.message));
  }

  // A sign of life passes whatever waits: a step may take longer than a lease.
  void send_now(InstanceId from, InstanceId to, Message message) { bus_.send(from, to, std::move(message)); }
  void send(InstanceId from, InstanceId to, Message message) override {
    {
      std::lock_guard lock(mutex_);
      if (holding_ && (to == kConductor || !held_.empty())) {
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
  bool holding_ = false;    // guarded by mutex_
  std::vector<Held> held_;  // guarded by mutex_, in the order of send()
};

}  // namespace xpyd::disagg
