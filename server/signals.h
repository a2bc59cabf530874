// SIGTERM and SIGINT, taken by a thread of their own: what they cause runs as ordinary code.
#pragma once

#include <signal.h>

#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>

#include "base/out_of_memory.h"

namespace xpyd {

class SignalThread {
 public:
  // Before any other thread: from here on they are blocked. Until handle() one ends the process,
  // for which there must be nothing to put in order; or, not `at_once`, waits for handle().
  explicit SignalThread(bool at_once) {
    sigemptyset(&set_);
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set_, signal);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);
    if (at_once) thread_ = std::thread([this] { take(); });
  }
  ~SignalThread() { finish(); }

  // From now on `handler` is told of each, with its count from 1.
  void handle(std::function<void(int count)> handler) {
    std::lock_guard lock(mutex_);
    handler_ = std::move(handler);
    if (!thread_.joinable()) thread_ = std::thread([this] { take(); });
  }
  // What the handler uses may go.
  void finish() {
    if (!thread_.joinable()) return;
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  int first() const { return first_; }  // after finish(): the first signal; 0: none came

 private:
  void take() {
    for (int received, count = 0; sigwait(&set_, &received) == 0 && received != SIGUSR1;) {
      std::lock_guard lock(mutex_);
      if (!handler_) std::_Exit(was_out_of_memory() ? 1 : 128 + received);
      if (++count == 1) first_ = received;
      handler_(count);
    }
  }

  sigset_t set_;
  std::mutex mutex_;
  std::function<void(int)> handler_;
  int first_ = 0;
  std::thread thread_;
};

}  // namespace xpyd
