// A queue without a bound, with many senders and one receiver. The receiver spins about 100 us before it sleeps. A
// sender pays for a wake-up (30 us across cores) only when the receiver sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "base/wait_word.h"

namespace xpyd {

template <class Message>
class Mailbox {
 public:
  void send(Message message) {
    {
      std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    poke();
  }

  // Ends a wait() without a message.
  void poke() {
    signals_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
      std::lock_guard lock(mutex_);
      wake_.notify_one();
    }
  }

  // Appends the messages that have arrived to `out`, in each sender's order.
  void take(std::vector<Message>& out) {
    seen_ = signals_.load(std::memory_order_seq_cst);
    std::lock_guard lock(mutex_);
    for (Message& message : messages_) out.push_back(std::move(message));
    messages_.clear();
  }

  // Returns when a message was sent or poke() was called since the last take(), or after `seconds`.
  void wait(double seconds) {
    using clock = std::chrono::steady_clock;
    auto spin_end = clock::now() + std::chrono::microseconds(100);
    do {
      for (int i = 0; i < 64; ++i) {
        if (signals_.load(std::memory_order_seq_cst) != seen_) return;
        cpu_relax();
      }
    } while (clock::now() < spin_end);
    std::unique_lock lock(mutex_);
    asleep_.store(true, std::memory_order_seq_cst);
    wake_.wait_for(lock, std::chrono::duration<double>(seconds),
                   [&] { return signals_.load(std::memory_order_seq_cst) != seen_; });
    asleep_.store(false, std::memory_order_seq_cst);
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Message> messages_;
  std::atomic<uint64_t> signals_{0};
  std::atomic<bool> asleep_{false};
  uint64_t seen_ = 0;  // used by the receiver alone
};

}  // namespace xpyd
