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
  // What is late happens now. Returns its name until then.
  uint32_t at(double time_s, std::function<void()> what) {
    if (free_.empty()) free_.push_back(uint32_t(whats_.size())), whats_.emplace_back();
    const uint32_t slot = free_.back();
    free_.pop_back();
    whats_[slot] = std::move(what);
    heap_.push_back({std::max(time_s, clock.seconds), ++number_, slot});
    std::push_heap(heap_.begin(), heap_.end());
    return slot;
  }
  // It does not happen. Before: it has not.
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
  size_t planned() const { return heap_.size(); }  // right after call_off() at most half of these off
  uint64_t last() const { return number_; }        // that was said
  // Until nothing is left. Returns how much happened.
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
  size_t called_off_ = 0;  // in the heap
};

}  // namespace xpyd::disagg
