// RegistrationTable keeps the registrations of one transport, if the owner's process checks every piece. It knows which
// peer may touch which bytes, how many pieces are inside now, and how many transfers have arrived.
//
// A slot of the table goes through: free -> open -> (closing, while pieces are inside) -> free again, with the next
// generation. A slot that has used all its generations is not used again.
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

// Sorts the ranges and joins those at most `gap` bytes apart, so find_range() is one search.
std::vector<AddressRange> joined(std::vector<AddressRange> ranges, uint64_t gap = 0);
// Requires: `ranges` are sorted and disjoint. Returns the range that contains all of these bytes, or null.
const AddressRange* find_range(std::span<const AddressRange> ranges, uint64_t begin, uint64_t bytes);

class RangeSet {
 public:
  RangeSet() = default;
  explicit RangeSet(std::span<const MemoryRange> ranges);
  bool contains(const std::byte* begin, size_t bytes) const {  // zero bytes are always inside
    return bytes == 0 || find_range(ranges_, reinterpret_cast<uint64_t>(begin), bytes);
  }

 private:
  std::vector<AddressRange> ranges_;
};

class RegistrationTable {
 public:
  // `secrets`: each key contains a random number, so nobody can guess it.
  explicit RegistrationTable(std::span<const MemoryRange> regions, bool secrets = false);

  // The owner's half, as in KvTransport.
  void connect(PeerId peer);
  void disconnect(PeerId peer);  // refuses new pieces; those inside leave by themselves
  bool connected(PeerId peer) const;
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const RemoteKey& registration);
  int arrived(const RemoteKey& registration) const;
  void shut();  // refuses all new pieces from now on

  // The half of the code that moves a peer's bytes. enter() announces a piece: the destinations (write) or sources
  // (read) of its copies are in the owner's memory. False: it must touch nothing. True: the
  // registration does not close before leave().
  bool enter(const RemoteKey& registration, PeerId peer, KvOp op, std::span<const Copy> copies);
  bool enter(const RemoteKey& registration, PeerId peer, KvOp op, const std::byte* begin, size_t bytes);
  // `whole`: this piece completes a transfer, which is counted as arrived. False: the registration was closed
  // meanwhile, and nothing is counted.
  bool leave(const RemoteKey& registration, bool whole);

 private:
  struct Slot {
    PeerId peer = -1;
    KvOp op = KvOp::write;
    uint32_t generation = 0;  // of the present or the last registration
    uint64_t secret = 0;
    bool open = false;
    int inside = 0, arrived = 0;
    RangeSet ranges;
  };
  Slot* admit(const RemoteKey& registration, PeerId peer, KvOp op);  // null: refused; requires mutex_
  const Slot* find(const RemoteKey& registration) const;             // null: closed; requires mutex_
  void free_if_left(uint32_t index);

  const RangeSet regions_;
  const bool secrets_;
  mutable std::mutex mutex_;
  std::deque<Slot> slots_;
  std::deque<uint32_t> free_;  // oldest first, so generations of all slots grow alike
  std::unordered_set<PeerId> peers_;
  bool shut_ = false;
};

}  // namespace xpyd::disagg
