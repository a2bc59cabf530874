// The owner's half of the tcp wire: connections that peers have made to it.
//
// Thread safety: Host: any thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>

#include "disagg/transport/tcp_frames.h"
#include "disagg/transport/tcp_loop.h"
#include "disagg/transport/window_table.h"

namespace xpyd::tcp {

struct Host {
  explicit Host(std::span<const MemoryRange> regions) : windows(regions, true) {}
  void disconnect(PeerId peer) {
    windows.disconnect(peer);
    ++disconnects;
  }
  // One more connection of a session, which has a number that its poster drew. Null: it is another peer's.
  std::shared_ptr<InboundSession> session(uint64_t number, PeerId peer);

  WindowTable windows;
  std::atomic<int> links{0};
  std::atomic<int> disconnects{0};  // links look whether it was theirs

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::weak_ptr<InboundSession>> sessions_;
};

// Null: there are too many.
std::unique_ptr<Link> make_owner_link(Fd socket, Host& host, std::shared_ptr<InboundSession> session);

}  // namespace xpyd::tcp
