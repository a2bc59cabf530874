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
class HeldPost final : public Post {
 public:
  explicit HeldPost(Post& post) : post_(post) {}

  // From now on messages to the conductor wait here, in their order. Those to other instances do not.
  void hold() {
    std::lock_guard lock(mutex_);
    holding_ = true;
  }
  // A token that begins or ends a choice is among those that wait.
  bool has_answers() {
    std::lock_guard lock(mutex_);
    for (const auto& [from, message] : held_)
      if (const auto* token = std::get_if<TokenOf>(&message);
          token && (token->index == 0 || token->event.finish != FinishReason::none))
        return true;
    return false;
  }
  // Ends hold(): `first`, where there is one, and all that has waited leave.
  void release(InstanceId from, std::optional<Message> first) {
    std::vector<std::pair<InstanceId, Message>> held;
    {
      std::lock_guard lock(mutex_);
      holding_ = false;
      held.swap(held_);
    }
    if (first) post_.send(from, kConductor, std::move(*first));
    for (auto& [sender, message] : held) post_.send(sender, kConductor, std::move(message));
  }

  void send(InstanceId from, InstanceId to, Message message) override {
    if (to == kConductor) {
      std::lock_guard lock(mutex_);
      if (holding_) {
        held_.emplace_back(from, std::move(message));
        return;
      }
    }
    post_.send(from, to, std::move(message));
  }

 private:
  Post& post_;
  std::mutex mutex_;
  bool holding_ = false;                              // guarded by mutex_
  std::vector<std::pair<InstanceId, Message>> held_;  // guarded by mutex_
};

}  // namespace xpyd::disagg
