// The windows of one transport, for wires whose pieces pass through the owner's process: which peer
// may touch which bytes, who is inside now, and how many posts have arrived.
//
// A slot of the table lives through this: free -> open -> (closing, while pieces are inside) ->
// free again with the next generation. A slot that has used all its generations is not used again.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/copy.h"
#include "base/status.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

// Sorted, and what lies at most `gap` bytes apart joined: so that "is this piece inside" is one search.
std::vector<AddressRange> joined(std::vector<AddressRange> ranges, uint64_t gap = 0);
// That of the sorted ranges, apart from each other, which holds all these bytes. Null: none does.
const AddressRange* find_range(std::span<const AddressRange> ranges, uint64_t begin, uint64_t bytes);

class RangeSet {
 public:
  RangeSet() = default;
  explicit RangeSet(std::span<const MemoryRange> ranges);
  bool contains(const std::byte* begin, size_t bytes) const {  // nothing is inside anything
    return bytes == 0 || find_range(ranges_, reinterpret_cast<uint64_t>(begin), bytes);
  }

 private:
  std::vector<AddressRange> ranges_;
};

class RegistrationTable {
 public:
  // `secrets`: keys carry a random number as well, so that none can be guessed.
  explicit RegistrationTable(std::span<const MemoryRange> regions, bool secrets = false);

  // The owner's half, as KvTransport says it.
  void connect(PeerId peer);
  void disconnect(PeerId peer);  // refused from now on; who is inside has to leave by itself
  bool connected(PeerId peer) const;
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const RemoteKey& registration);
  int arrived(const RemoteKey& registration) const;
  int64_t refused() const;
  void shut();  // refuses everybody from now on

  // The half of whoever moves a peer's bytes. enter() announces a piece: its copies touch the
  // owner's memory with their destinations (write) or sources (read). False: counted as refused,
  // and nothing may be touched. True: the window does not close before leave().
  bool enter(const RemoteKey& registration, PeerId peer, KvOp op, std::span<const Copy> copies);
  bool enter(const RemoteKey& registration, PeerId peer, KvOp op, const std::byte* begin, size_t bytes);
  // `whole`: with this piece a post is complete, and counted as arrived. False: the window has been
  // closed meanwhile, and nothing was counted.
  bool leave(const RemoteKey& registration, bool whole);
  void count_refused();  // a piece that did not get as far as enter()

 private:
  struct Slot {
    PeerId peer = -1;
    KvOp op = KvOp::write;
    uint32_t generation = 0;  // of the window that is here, or was last
    uint64_t secret = 0;
    bool open = false;
    int inside = 0, arrived = 0;
    RangeSet ranges;
  };
  Slot* admit(const RemoteKey& registration, PeerId peer, KvOp op);  // null: refused; mutex_ is held
  const Slot* find(const RemoteKey& registration) const;             // null: not any more; mutex_ is held
  void free_if_left(uint32_t index);

  const RangeSet regions_;
  const bool secrets_;
  mutable std::mutex mutex_;
  std::deque<Slot> slots_;
  std::deque<uint32_t> free_;  // oldest first: generations of all slots grow alike
  std::unordered_set<PeerId> peers_;
  int64_t refused_ = 0;
  bool shut_ = false;
};

}  // namespace xpyd::disagg
