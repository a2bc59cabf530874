// The registrations of an shm transport, in memory that its peers map. Peers check by themselves before each piece
// whether they may access it, and say that they are inside, with hazard pointers (Michael, 2004). The peer stores its
// hazard record and then loads the registration's state. The owner stores the state and then loads all hazard records.
// All of these are seq_cst, so at least one of the two sees the other.
//
//   owner   open: state = (generation, open) ... close: state = (generation, closed); a record has
//                                                       this key? false : true, the slot is free
//   peer    record = key; state as in the key?  yes: copy a piece; record = 0
//                                               no:  record = 0; refused
//
// The table does not contain the ranges of a registration. Peers are processes of one program and one user. A peer that
// breaks these rules, or leaves its ranges, can write anywhere in the pool.
#pragma once

#include <atomic>
#include <cstdint>

#include "disagg/transport/registration_table.h"

namespace xpyd::disagg {

struct alignas(64) SharedSlot {
  std::atomic<uint64_t> state{0};  // generation << 1 | open
  std::atomic<int32_t> peer{-1};
  std::atomic<uint32_t> op{0};
  std::atomic<uint32_t> arrived{0};
};

// The hazard record of one peer: what its threads are inside of (the instance's thread and the copier).
constexpr int kLineThreads = 2;
struct alignas(64) SharedLine {
  std::atomic<uint64_t> inside[kLineThreads];  // index << 32 | generation; 0: nothing
};

constexpr int kSharedSlots = 16384;
constexpr int kSharedLines = 256;

struct SharedTable {
  static constexpr uint64_t kMagic = 0x3430'6d68'7364'7978;  // "xydshm04"
  uint64_t magic = kMagic;
  SharedLine lines[kSharedLines];
  SharedSlot slots[kSharedSlots];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The peer's half. Between a true enter() and leave() the registration does not close.
class SharedRegistrations {
 public:
  SharedRegistrations() = default;
  SharedRegistrations(SharedTable* table, int line, PeerId self) : table_(table), line_(line), self_(self) {}

  bool enter(const KvTransfer& transfer, int thread) {
    const RemoteKey& key = transfer.registration;
    if (key.generation == 0 || key.index >= uint32_t(kSharedSlots)) return false;
    inside(thread).store(uint64_t(key.index) << 32 | key.generation, std::memory_order_seq_cst);
    const SharedSlot& slot = table_->slots[key.index];
    const bool open = slot.state.load(std::memory_order_seq_cst) == (uint64_t(key.generation) << 1 | 1);
    if (open && slot.peer.load(std::memory_order_relaxed) == self_ &&
        slot.op.load(std::memory_order_relaxed) == uint32_t(transfer.op))
      return true;
    leave(thread);
    return false;
  }
  void count_arrived(const KvTransfer& transfer) {  // requires: inside
    table_->slots[transfer.registration.index].arrived.fetch_add(1, std::memory_order_release);
  }
  void leave(int thread) { inside(thread).store(0, std::memory_order_release); }

 private:
  std::atomic<uint64_t>& inside(int thread) { return table_->lines[line_].inside[thread]; }
  SharedTable* table_ = nullptr;
  int line_ = 0;
  PeerId self_ = -1;
};

}  // namespace xpyd::disagg
