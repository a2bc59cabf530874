// One end of a channel, as a test sees it, and a stranger at its door.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "disagg/net/address.h"
#include "disagg/net/channel.h"
#include "disagg/net/hello.h"
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
        XPYD_CHECK(closes < opens);  // Catch2 may be used by the test's thread alone
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
};

// A socket that belongs to no member.
struct Stranger {
  explicit Stranger(const std::string& address) {
    auto parsed = parse_control_address(address);
    REQUIRE(parsed.ok());
    auto made = connect_to(parsed.value());
    REQUIRE(made.ok());
    fd = made.value();
    pollfd connected{fd, POLLOUT, 0};
    REQUIRE(poll(&connected, 1, 60000) == 1);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    timeval minute{60, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &minute, sizeof minute);
  }
  ~Stranger() { close(fd); }
  void say(std::string_view bytes) {
    while (!bytes.empty()) {
      ssize_t n = TEMP_FAILURE_RETRY(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL));
      if (n <= 0) return;
      bytes.remove_prefix(size_t(n));
    }
  }
  // Returns all bytes until the other side closes, which it must do within a minute.
  std::string hear() {
    std::string all;
    char buffer[4096];
    ssize_t n;
    while ((n = TEMP_FAILURE_RETRY(recv(fd, buffer, sizeof buffer, 0))) > 0) all.append(buffer, size_t(n));
    CHECK((n == 0 || errno == ECONNRESET));
    return all;
  }
  // Goes through a handshake until it is done or one side ends it. Returns the bytes that came behind it.
  std::string shake(Handshake& handshake) {
    std::string out, rest;
    std::string_view none;
    REQUIRE(handshake.feed(none, out).ok());
    while (!handshake.done()) {
      say(out);
      out.clear();
      char buffer[1024];
      const ssize_t n = recv(fd, buffer, sizeof buffer, 0);
      if (n <= 0) break;
      std::string_view more(buffer, size_t(n));
      if (!handshake.feed(more, out)) break;
      rest += more;
    }
    return rest;
  }
  int fd = -1;
};

}  // namespace xpyd::testing
