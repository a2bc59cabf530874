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
    heap_.push_back({std::max(time_s, clock.seconds), ++number_, std::move(what)});
    std::push_heap(heap_.begin(), heap_.end());
  }
  // Until nothing is left. Returns how much happened.
  int64_t run() {
    int64_t n = 0;
    for (; !heap_.empty(); ++n) {
      std::pop_heap(heap_.begin(), heap_.end());
      Event event = std::move(heap_.back());
      heap_.pop_back();
      clock.seconds = event.time_s;
      event.what();
    }
    return n;
  }

 private:
  struct Event {
    double time_s;
    uint64_t number;
    std::function<void()> what;
    // The heap's top is its greatest.
    bool operator<(const Event& other) const {
      return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
  };
  std::vector<Event> heap_;
  uint64_t number_ = 0;
};

}  // namespace xpyd::disagg
