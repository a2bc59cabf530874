// The CPU, except that copies between a pool and its offload tiers are made when the test says so.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "base/device/device.h"

namespace xpyd::testing {

class LateCopies final : public Device {
 public:
  const char* name() const override { return "cpu"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return cpu_device().allocate(bytes); }
  Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) override {
    return cpu_device().make_page_groups(options);
  }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double) override { return std::make_unique<Queue>(*this); }
  std::atomic<bool> late{false};  // nothing is copied while it is set
  std::atomic<bool> slow{false};  // every second look finds one more copied

 private:
  class Queue final : public DeviceQueue {
   public:
    explicit Queue(LateCopies& device) : device_(device) {}
    void copy(std::span<const Copy> copies, bool) override {
      jobs_.emplace_back(copies.begin(), copies.end());
      ++enqueued_;
    }
    int64_t mark() override { return enqueued_; }
    bool reached(int64_t mark) override {
      if (device_.slow) {
        if (++looks_ % 2 == 0) copy_first();
      } else if (!device_.late) {
        wait();
      }
      return done_ >= mark;
    }
    void wait() override {
      while (!jobs_.empty()) copy_first();
    }

   private:
    void copy_first() {
      if (jobs_.empty()) return;
      for (const Copy& c : jobs_.front()) std::memcpy(c.destination, c.source, c.bytes);
      jobs_.pop_front();
      ++done_;
    }
    LateCopies& device_;
    std::deque<std::vector<Copy>> jobs_;
    int64_t enqueued_ = 0, done_ = 0, looks_ = 0;
  };
};

}  // namespace xpyd::testing
