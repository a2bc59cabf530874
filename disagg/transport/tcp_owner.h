// The owner's half of the tcp wire: connections that peers have made to it.
//
// Thread safety: Host: any thread. Listener: its loop's.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <span>

#include "disagg/transport/tcp_frames.h"
#include "disagg/transport/tcp_loop.h"
#include "disagg/transport/window_table.h"

namespace xpyd::tcp {

struct Host {
  Host(std::span<const MemoryRange> regions, const TcpToken& token)
      : windows(regions, true), inbound(regions, windows, token) {}
  void disconnect(PeerId peer) {
    windows.disconnect(peer);
    ++disconnects;
  }
  WindowTable windows;
  InboundHost inbound;
  std::atomic<int> links{0};
  // Descriptors of links without a token yet, oldest first. One of them leaves the list before it
  // is closed.
  std::mutex strangers_mutex;
  std::deque<int> strangers;
  std::atomic<int> disconnects{0};  // links look whether it was theirs
};

// Lets peers in; each gets a link of its own in the next loop.
class Listener final : public Link {
 public:
  Listener(int fd, Host& host, std::function<Loop&()> next_loop)
      : Link(fd), host_(host), next_loop_(std::move(next_loop)) {}
  Next run() override;

 private:
  Host& host_;
  const std::function<Loop&()> next_loop_;
};

}  // namespace xpyd::tcp
