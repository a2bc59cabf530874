// A device whose copies between its memory and the host's take the time of a link, under a virtual clock.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/device/device.h"

namespace xpyd::testing {

// A copy is made at once. It is over when a link of `byte_s` seconds a byte would have made it, behind those before it.
class LinkDevice final : public Device {
 public:
  LinkDevice(VirtualClock& clock, double byte_s) : clock_(clock), byte_s_(byte_s) {}
  const char* name() const override { return "cpu"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return cpu_device().allocate(bytes); }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double) override { return std::make_unique<Queue>(*this); }

 private:
  class Queue final : public DeviceQueue {
   public:
    explicit Queue(LinkDevice& link) : link_(link) {}
    void copy(std::span<const Copy> copies, bool) override {
      free_s_ = std::max(free_s_, link_.clock_.seconds);
      for (const Copy& c : copies) {
        std::memcpy(c.destination, c.source, c.bytes);
        free_s_ += double(c.bytes) * link_.byte_s_;
      }
    }
    int64_t mark() override {
      ends_s_.push_back(free_s_);
      return int64_t(ends_s_.size()) - 1;
    }
    bool reached(int64_t mark) override { return mark < 0 || ends_s_[size_t(mark)] <= link_.clock_.seconds; }
    void wait() override { link_.clock_.seconds = std::max(link_.clock_.seconds, free_s_); }

   private:
    LinkDevice& link_;
    double free_s_ = 0;
    std::vector<double> ends_s_;
  };
  VirtualClock& clock_;
  const double byte_s_;
};

}  // namespace xpyd::testing
