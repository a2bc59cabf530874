// Virtual time: what happens when, in the order of time and, at one time, in the order in which it was said.
//
// Thread safety: none; one thread drives everything.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace xpyd::disagg {

class Timeline {
 public:
  VirtualClock clock;

  double now() const { return clock.seconds; }
  // What is late happens now.
  void at(double time_s, std::function<void()> what) {
    if (free_.empty()) free_.push_back(uint32_t(whats_.size())), whats_.emplace_back();
    const uint32_t slot = free_.back();
    free_.pop_back();
    whats_[slot] = std::move(what);
    heap_.push_back({std::max(time_s, clock.seconds), ++number_, slot});
    std::push_heap(heap_.begin(), heap_.end());
  }
  uint64_t last() const { return number_; }  // that was said
  // Until nothing is left. Returns how much happened.
  int64_t run() {
    int64_t n = 0;
    for (; !heap_.empty(); ++n) {
      std::pop_heap(heap_.begin(), heap_.end());
      const Event event = heap_.back();
      heap_.pop_back();
      clock.seconds = event.time_s;
      const std::function<void()> what = std::move(whats_[event.slot]);
      free_.push_back(event.slot);
      what();
    }
    return n;
  }

 private:
  struct Event {
    double time_s;
    uint64_t number;
    uint32_t slot;  // of whats_
    // The heap's top is its greatest.
    bool operator<(const Event& other) const {
      return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
  };
  std::vector<Event> heap_;
  std::vector<std::function<void()>> whats_;
  std::vector<uint32_t> free_;
  uint64_t number_ = 0;
};

}  // namespace xpyd::disagg
