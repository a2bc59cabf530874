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
  Serving(std::vector<NicPort>& nic_ports, std::vector<MemoryRange> regions);
  ~Serving();

  // As KvTransport says it.
  void connect(PeerId peer);
  void disconnect(PeerId peer);
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const RemoteKey& registration);
  int arrived(const RemoteKey& registration);
  int64_t refused();

  // What the peer's side says on its channel.
  // Answers it: number of rails, 0 where it was refused.
  size_t join(PeerId peer, const ChannelPtr& channel, const Offer& offer);
  bool take(PeerId peer, const Message& message);  // false: nonsense
  void left(PeerId peer, const Channel* channel);

 private:
  struct Grant {
    MemoryWindow window;
    MemoryRegion region;
  };
  struct Registration {
    RemoteKey key;
    PeerId peer = -1;
    KvOp op = KvOp::write;
    std::vector<AddressRange> ranges;
    std::vector<std::vector<Grant>> grants;  // [rails of the link][ranges]; empty: no keys now
    int arrived = 0;
    bool closing = false;
    int pending = 0;      // last requests of batches that are under way
    bool failed = false;  // one of them did not go through
  };
  struct Client {  // a peer that has called us
    ChannelPtr channel;
    std::vector<Queue> queues;  // empty: broken
    std::vector<int> in_flight;
  };

  // Windows and guests.
  Registration* find(const RemoteKey& registration);
  Status make_queues_for(Client& client, const std::vector<NicPortEnd>& theirs);
  // Keys, from being made to being revoked, and arrivals.
  Status grant(Registration& registration, Client& client);
  Status grant_on(Registration& registration, Client& client, size_t nic_port);
  void grant_all(PeerId peer, Client& client);
  bool revoke(Registration& registration);  // false: not yet
  void drop_queues(PeerId peer, Client& client);
  bool post(Client& client, size_t nic_port, std::vector<ibv_send_wr>& requests, Registration& registration);
  bool settle(Registration& registration, double seconds);
  Result<MemoryWindow> spare(size_t nic_port);
  void poll();
  void completed(size_t nic_port, const ibv_wc& wc);
  void arrived(size_t nic_port, const ibv_wc& wc);

  std::vector<NicPort>& nic_ports_;
  const std::vector<MemoryRange> regions_;
  std::mutex mutex_;
  std::set<PeerId> connected_;
  std::map<PeerId, Client> clients_;
  std::vector<std::deque<MemoryWindow>> spare_;               // [rails]; unbound, oldest first
  std::vector<int> used_;                                     // [rails]; receives to be posted again
  std::unordered_map<uint32_t, Registration> registrations_;  // by generation
  std::deque<uint32_t> free_indices_;
  uint32_t n_indices_ = 0, last_generation_ = 0;
  int64_t refused_ = 0;
};

}  // namespace xpyd::disagg::rdma
