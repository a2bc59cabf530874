// The owner's half of the rdma wire: windows, their keys, and the ends of links that peers post to.
//
// A key is a memory window of type 2B, bound to one range and to the one queue pair of the peer that it was opened for;
// closing a window invalidates its keys by a local request, which is in force when it completes. No request of this
// half waits for a peer, so a peer that is stopped cannot hold up a revocation. Where a device has no such windows a
// key is a registration of the range, which is removed at the close.
//
// A link that broke is renewed by the side that posts: the old queue pairs go, and with them every
// key of that peer; windows stay, and get new keys, which the peer is told.
//
// Thread safety: any thread.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "disagg/transport/rdma/rdma_plan.h"
#include "disagg/transport/rdma/rdma_verbs.h"

namespace xpyd::disagg::rdma {

class Serving {
 public:
  Serving(std::vector<Rail>& rails, std::vector<MemoryRange> regions);
  ~Serving();

  // As KvTransport says it.
  void connect(PeerId peer);
  void disconnect(PeerId peer);
  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const WindowKey& window);
  int arrived(const WindowKey& window);
  int64_t refused();

  // What the peer's side says on its channel.
  // Answers it: number of rails, 0 where it was refused.
  size_t join(PeerId peer, const ChannelPtr& channel, const Offer& offer);
  bool take(PeerId peer, const Message& message);  // false: nonsense
  void left(PeerId peer, const Channel* channel);

 private:
  struct Grant {
    MemoryWindow window;
    Registration registration;
  };
  struct Window {
    WindowKey key;
    PeerId peer = -1;
    KvOp op = KvOp::write;
    std::vector<AddressRange> ranges;
    std::vector<std::vector<Grant>> grants;  // [rails of the link][ranges]; empty: no keys now
    int arrived = 0;
    bool closing = false;
    int pending = 0;      // last requests of batches that are under way
    bool failed = false;  // one of them did not go through
  };
  struct Guest {  // a peer that has called us
    ChannelPtr channel;
    std::vector<Queue> queues;  // empty: broken
    std::vector<int> in_flight;
  };

  // Windows and guests.
  Window* find(const WindowKey& window);
  Status make_queues_for(Guest& guest, const std::vector<RailEnd>& theirs);
  // Keys, from being made to being revoked, and arrivals.
  Status grant(Window& window, Guest& guest);
  Status grant_on(Window& window, Guest& guest, size_t rail);
  void grant_all(PeerId peer, Guest& guest);
  bool revoke(Window& window);  // false: not yet
  void drop_queues(PeerId peer, Guest& guest);
  bool post(Guest& guest, size_t rail, std::vector<ibv_send_wr>& requests, Window& window);
  bool settle(Window& window, double seconds);
  Result<MemoryWindow> spare(size_t rail);
  void poll();
  void completed(size_t rail, const ibv_wc& wc);
  void arrived(size_t rail, const ibv_wc& wc);

  std::vector<Rail>& rails_;
  const std::vector<MemoryRange> regions_;
  std::mutex mutex_;
  std::set<PeerId> connected_;
  std::map<PeerId, Guest> guests_;
  std::vector<std::deque<MemoryWindow>> spare_;   // [rails]; unbound, oldest first
  std::vector<int> used_;                         // [rails]; receives to be posted again
  std::unordered_map<uint32_t, Window> windows_;  // by generation
  std::deque<uint32_t> free_indices_;
  uint32_t n_indices_ = 0, last_generation_ = 0;
  int64_t refused_ = 0;
};

}  // namespace xpyd::disagg::rdma
