// Virtual time: a queue of events, ordered by time. Events at equal times keep the order in which they were added.
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
  // Adds an event. A time in the past means now. Returns the event's slot, which is valid until the event happens.
  uint32_t at(double time_s, std::function<void()> what) {
    if (free_.empty()) free_.push_back(uint32_t(whats_.size())), whats_.emplace_back();
    const uint32_t slot = free_.back();
    free_.pop_back();
    whats_[slot] = std::move(what);
    heap_.push_back({std::max(time_s, clock.seconds), ++number_, slot});
    std::push_heap(heap_.begin(), heap_.end());
    return slot;
  }
  // Removes an event. Requires: it has not happened.
  void call_off(uint32_t slot) {
    whats_[slot] = nullptr;
    if (++called_off_ <= heap_.size() / 2) return;
    std::erase_if(heap_, [this](const Event& event) {
      if (whats_[event.slot]) return false;
      free_.push_back(event.slot);
      return true;
    });
    std::make_heap(heap_.begin(), heap_.end());
    called_off_ = 0;
  }
  size_t planned() const { return heap_.size(); }  // right after call_off(), at most half of them are called off
  uint64_t last() const { return number_; }        // number of the event added last
  // Runs events until none is left. Returns how many ran.
  int64_t run() {
    int64_t n = 0;
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end());
      const Event event = heap_.back();
      heap_.pop_back();
      const std::function<void()> what = std::move(whats_[event.slot]);
      free_.push_back(event.slot);
      if (!what) {
        --called_off_;
        continue;
      }
      clock.seconds = event.time_s;
      what();
      ++n;
    }
    return n;
  }

 private:
  struct Event {
    double time_s;
    uint64_t number;
    uint32_t slot;  // index in whats_
    // std::push_heap keeps the greatest event on top, so the earliest event must be the greatest.
    bool operator<(const Event& other) const {
      return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
  };
  std::vector<Event> heap_;
  std::vector<std::function<void()>> whats_;
  std::vector<uint32_t> free_;
  uint64_t number_ = 0;
  size_t called_off_ = 0;  // still in heap_
};

}  // namespace xpyd::disagg
