// SIGTERM and SIGINT, received by a thread of their own, so that the reaction is ordinary code.
#pragma once

#include <signal.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace xpyd::server {

// At most one per process.
class SignalThread {
 public:
  // Construct before any other thread starts: the signals are blocked from here on. Before handle(), a signal ends the
  // process at once; after hold(), it waits for handle().
  SignalThread() {
    sigemptyset(&set_);
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set_, signal);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    thread_ = std::thread([this] { take(); });
  }
  ~SignalThread() { finish(); }

  // For code that creates something that has to be cleaned up.
  static void hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  // From now on `handler` is called for each signal, with its count from 1.
  void handle(std::function<void(int count)> handler) {
    std::lock_guard lock(mutex_);
    handler_ = std::move(handler);
    ready_.notify_all();
  }
  // After this call the objects that the handler uses may be destroyed.
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
  int first() const { return first_; }  // after finish(): the first signal; 0: none

 private:
  void take() {
    for (int received, count = 0; sigwait(&set_, &received) == 0 && received != SIGUSR1;) {
      std::unique_lock lock(mutex_);
      if (!handler_ && !held_) std::_Exit(128 + received);
      ready_.wait(lock, [this] { return handler_ || finished_; });
      if (!handler_) return;
      if (++count == 1) first_ = received;
      handler_(count);
    }
  }

  static inline std::mutex mutex_;  // guards the members below
  static inline bool held_ = false;
  std::condition_variable ready_;
  std::function<void(int)> handler_;
  bool finished_ = false;
  sigset_t set_;
  int first_ = 0;
  std::thread thread_;
};

}  // namespace xpyd::server
