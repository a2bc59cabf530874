// One end of a channel, as a test sees it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "disagg/net/channel.h"
#include "tests/catch.h"

namespace xpyd::testing {

// Records what one end sees, of one channel after another. wait() returns when `condition` holds, and fails the test
// after a minute.
struct End {
  std::mutex mutex;
  std::condition_variable changed;
  ChannelPtr channel;
  std::vector<std::pair<int, std::string>> frames;
  std::string closed;
  int opens = 0, closes = 0;
  std::function<void(End&, std::string_view)> reply;

  OnOpen on_open() {
    return [this](ChannelPtr opened) {
      std::lock_guard lock(mutex);
      channel = opened;
      ++opens;
      changed.notify_all();
      ChannelEvents events;
      events.on_frame = [this](uint16_t type, std::string_view payload) {
        std::lock_guard inner(mutex);
        CHECK_THREAD(closes < opens);
        frames.emplace_back(type, payload);
        if (reply) reply(*this, payload);
        changed.notify_all();
      };
      events.on_closed = [this](const std::string& reason) {
        std::lock_guard inner(mutex);
        closed = reason;
        ++closes;
        changed.notify_all();
      };
      return events;
    };
  }
  template <class Condition>
  void wait(Condition condition) {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, std::chrono::seconds(60), condition)) FAIL("waited for a minute");
  }
  void wait_closed() {
    wait([&] { return closes > 0; });
  }
  // Catch2's assertions may be used by the test's thread alone.
  static void CHECK_THREAD(bool holds) { XPYD_CHECK(holds); }
};

}  // namespace xpyd::testing
