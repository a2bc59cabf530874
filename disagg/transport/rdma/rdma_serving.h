// The owner's half of the rdma transport: registrations, their remote keys, and the queue pairs of the clients, which
// are the peers that have called this instance.
//
// A key is a verbs memory window of type 2B. It is bound to one range and to one queue pair of the peer that it was
// opened for. close() invalidates the keys by a local request, which is in force when it completes. No request of this
// half waits for a peer, so a stopped peer cannot delay a revocation.
//
// A memory window is younger than the queue pair that it is bound to, and is destroyed before it. When a process is
// killed, the kernel destroys its youngest objects first, and Soft-RoCE waits 50 s to destroy a queue pair that a window
// is bound to.
//
// A card that does not answer within kBindSeconds breaks the link: the queue pairs are destroyed and the channel is
// closed, so the initiator hears of it and connects again.
//
// The initiator renews a link that broke. The old queue pairs and every key of that peer are destroyed. Registrations
// stay and get new keys, which the owner sends to the peer.
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

  // As in KvTransport.
  void connect(PeerId peer);
  void disconnect(PeerId peer);
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const RemoteKey& registration);
  int arrived(const RemoteKey& registration);

  // Events of a client's channel.
  // Makes queue pairs for the client and answers it. Returns the number of NIC ports of the link, 0 if it was refused.
  size_t join(PeerId peer, const ChannelPtr& channel, const Offer& offer);
  bool take(PeerId peer, const Message& message);  // false: a client does not send this
  void left(PeerId peer, const Channel* channel);  // the channel has ended

 private:
  struct Registration {
    RemoteKey key;
    PeerId peer = -1;
    KvOp op = KvOp::write;
    std::vector<AddressRange> ranges;
    std::vector<std::vector<MemoryWindow>> windows;  // [NIC ports of the link][ranges]; empty: no keys now
    int arrived = 0;
    bool closing = false;
    int pending = 0;      // bind or invalidate batches in flight
    bool failed = false;  // one of their requests failed
    double until_s = 0;   // RealClock: when the invalidations must have completed
  };
  struct Client {  // a peer that has called this instance
    ChannelPtr channel;
    std::vector<Queue> queues;   // empty: the link is broken
    std::vector<int> in_flight;  // bind and invalidate requests, by NIC port
    std::vector<std::deque<MemoryWindow>> spare;  // by NIC port; unbound, oldest first
  };

  // Registrations and clients.
  Registration* find(const RemoteKey& registration);
  Status make_queues_for(Client& client, const std::vector<NicPortEnd>& theirs);
  // Keys are made and revoked; arrivals are counted.
  Status grant(Registration& registration, Client& client);
  Status grant_on(Registration& registration, Client& client, size_t nic_port);
  void grant_all(PeerId peer, Client& client);
  bool revoke(Registration& registration);  // false: not complete yet
  void drop_queues(PeerId peer, Client& client);
  void break_link(PeerId peer, Client& client);
  bool post(Client& client, size_t nic_port, std::vector<ibv_send_wr>& requests, Registration& registration);
  bool settle(Registration& registration, double seconds);
  Result<MemoryWindow> spare(Client& client, size_t nic_port);
  void poll();
  void completed(size_t nic_port, const ibv_wc& wc);
  void arrived(size_t nic_port, const ibv_wc& wc);

  std::vector<NicPort>& nic_ports_;
  const std::vector<MemoryRange> regions_;
  std::mutex mutex_;
  std::set<PeerId> connected_;
  std::map<PeerId, Client> clients_;
  std::vector<int> used_;                                     // [NIC ports]; receives to be posted again
  std::unordered_map<uint32_t, Registration> registrations_;  // by generation
  std::deque<uint32_t> free_indices_;
  uint32_t n_indices_ = 0, last_generation_ = 0;
};

}  // namespace xpyd::disagg::rdma
