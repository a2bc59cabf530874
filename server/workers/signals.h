// SIGTERM and SIGINT, taken by a thread of their own: what they cause runs as ordinary code.
#pragma once

#include <signal.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "base/memory.h"

namespace xpyd::server {

// One of a process.
class SignalThread {
 public:
  // Before any other thread: from here on they are blocked. Until handle() one ends the process at
  // once; after hold() it waits for handle().
  SignalThread() {
    sigemptyset(&set_);
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set_, signal);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    thread_ = std::thread([this] { take(); });
  }
  ~SignalThread() { finish(); }

  // Whoever makes something that has to be put in order.
  static void hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  // From now on `handler` is told of each, with its count from 1.
  void handle(std::function<void(int count)> handler) {
    std::lock_guard lock(mutex_);
    handler_ = std::move(handler);
    ready_.notify_all();
  }
  // What the handler uses may go.
  void finish() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      finished_ = true;
      ready_.notify_all();
    }
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  int first() const { return first_; }  // after finish(): the first signal; 0: none came

 private:
  void take() {
    for (int received, count = 0; sigwait(&set_, &received) == 0 && received != SIGUSR1;) {
      std::unique_lock lock(mutex_);
      if (!handler_ && !held_) std::_Exit(was_out_of_memory() ? 1 : 128 + received);
      ready_.wait(lock, [this] { return handler_ || finished_; });
      if (!handler_) return;
      if (++count == 1) first_ = received;
      handler_(count);
    }
  }

  static inline std::mutex mutex_;  // guards what follows
  static inline bool held_ = false;
  std::condition_variable ready_;
  std::function<void(int)> handler_;
  bool finished_ = false;
  sigset_t set_;
  int first_ = 0;
  std::thread thread_;
};

}  // namespace xpyd::server
