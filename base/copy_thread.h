// A queue whose copies a thread of its own makes, so that they overlap with the caller's work: what
// a copy engine is to a GPU.
//
// Thread safety: one owner; reached() and wait() order the copied bytes before what follows them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/device.h"

namespace xpyd {

class CopyThread final : public DeviceQueue {
 public:
  // `gbps`: a slower wire than this machine's memory, GB/s; 0: as fast as it goes.
  explicit CopyThread(double gbps);
  ~CopyThread() override;  // after everything enqueued

  void copy(std::span<const Copy> copies, bool read_soon) override;
  int64_t mark() override { return enqueued_; }
  bool reached(int64_t mark) override { return done_.load(std::memory_order_acquire) >= mark; }
  void wait() override;

 private:
  struct Job {
    std::vector<Copy> copies;
    bool read_soon;
  };
  void work();
  void run(const Job& job);

  const double gbps_;
  int64_t enqueued_ = 0;          // jobs; the owner's
  std::atomic<int64_t> done_{0};  // jobs
  double wire_free_s_ = 0;        // the thread's: when the slow wire has taken what it was given

  std::mutex mutex_;
  std::condition_variable posted_, finished_;
  std::deque<Job> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace xpyd
