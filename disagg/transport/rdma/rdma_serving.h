// The owner's half of the rdma transport: registrations with their keys, and the queue pairs of the clients, which are
// the peers that have called this instance.
//
// A key is a memory window of type 1, bound to one range. It works on every queue pair of the owner, so it outlives a
// link that breaks, and open() needs no link. close() binds the windows to nothing, which is in force when it
// completes. Binds go through a queue pair that is connected to itself, so they wait for no peer. A card that refuses a
// bind or does not answer within kBindSeconds gets no binds any more, and close() destroys the windows.
//
// Thread safety: any thread.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "disagg/transport/rdma/rdma_verbs.h"

namespace xpyd::disagg::rdma {

// RemoteKey::secret. The card does not ask who uses a key, or for what, before it moves bytes; the initiator does.
inline uint64_t permit(PeerId peer, KvOp op) { return uint64_t(peer) << 1 | uint64_t(op); }

constexpr size_t kMaxKeys = 256;  // ranges of one registration

// Returns the index of the first region that contains these bytes, or regions.size() if none does.
size_t region_of(std::span<const MemoryRange> regions, const std::byte* at, size_t bytes);

// Returns the ranges that a registration of these pieces gets keys for: sorted, and joined where they are adjacent in
// one region. If there are more than kMaxKeys, it also joins ranges over the smallest gaps. Errors: a piece is outside
// the regions; more than kMaxKeys regions.
Result<std::vector<AddressRange>> cover(std::span<const MemoryRange> pieces, std::span<const MemoryRange> regions);

class Serving {
 public:
  Serving(std::vector<NicPort>& nic_ports, std::vector<MemoryRange> regions)
      : nic_ports_(nic_ports), regions_(std::move(regions)), spare_(nic_ports.size()) {}

  // As in KvTransport.
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const RemoteKey& registration);
  int arrived(const RemoteKey& registration);

  // Makes queue pairs for a peer that calls, and answers it. Returns false if it was refused.
  bool join(PeerId peer, const ChannelPtr& channel, const Offer& offer);
  // The peer's channel has ended, or the peer is given up (null). Its queue pairs are destroyed.
  void leave(PeerId peer, const Channel* channel);

 private:
  struct Registration {
    RemoteKey key;
    std::vector<MemoryWindow> windows;  // [ranges][NIC ports], as key.rkeys
    int arrived = 0;
  };
  struct Client {
    ChannelPtr channel;
    std::vector<Queue> queues;
  };
  Result<MemoryWindow> window(size_t nic_port);
  bool bind(const Registration& registration, unsigned access);
  void poll();

  std::vector<NicPort>& nic_ports_;
  const std::vector<MemoryRange> regions_;
  std::mutex mutex_;
  std::map<PeerId, Client> clients_;
  std::vector<std::deque<MemoryWindow>> spare_;               // [NIC ports]; bound to nothing, oldest first
  std::unordered_map<uint32_t, Registration> registrations_;  // by generation
  uint32_t last_generation_ = 0;
  bool answers_ = true;  // the cards bind
};

}  // namespace xpyd::disagg::rdma
