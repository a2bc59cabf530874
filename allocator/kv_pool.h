// KvPool: equal blocks of KV memory, from which several memories draw, and the users of each block. It is the common
// part of all schemes' pools. An implementation decides what a block is, which block is taken, and what happens to a
// block that nobody uses: BlockPool (paged, contiguous, slots) or PageGroupRows (vattention).
//
// A block is in one state:
//   in_transfer  held by a lease or a hand-over
//   active       referenced by a sequence, not held
//   cached       neither; the implementation keeps its content until somebody wants the room
//   free         none of these
// A block in one of the first two states is in use, and is filled with written tokens. stats() knows how much of the
// pool holds KV, and counts a block that several sequences share once.
//
// Thread safety: every function locks for itself, except add_written() and filled(); stats() is a consistent snapshot.
// KV bytes are not locked: only the owner of a block writes it, at tokens that nobody reads yet. A broken requirement
// aborts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "allocator/kv_memory.h"
#include "base/wait_word.h"

namespace xpyd::allocator {

class CacheListener;  // prefix_log.h

class KvPool {
 public:
  virtual ~KvPool() = default;
  // Where the blocks are. A block has the same number on every rank.
  const KvPlaces& places() const { return places_; }
  const KvLayout& layout() const { return places_.whole; }
  std::byte* data() const { return places_.base(0); }
  size_t block_bytes() const { return block_bytes_; }  // on all ranks

  // Adds one reference to each. Requires: none of them is free.
  void add_references(std::span<const int32_t> blocks);
  // Drops one reference of each, from the last block to the first, so that tails become the oldest of an LRU.
  void release(std::span<const int32_t> blocks);
  // The number of sequences that may write after the tokens of this block: references and hand-overs, but not leases.
  int users(int32_t block) const;
  // True if there is one such sequence and no lease. An ended sequence may leave a lease, under which a peer writes.
  bool alone(int32_t block) const;
  // Adds a lease's hold to each block, beyond references. Requires: they are in use.
  void hold(std::span<const int32_t> blocks);
  void unhold(std::span<const int32_t> blocks);

  // Turns one reference of each block into a hold of the hand-over. adopt() turns it back; discard() drops it.
  void begin_handover(const KvHandover& handover);
  void adopt(const KvHandover& handover);
  void discard(const KvHandover& handover);

  // Counts the KV of n more tokens. `blocks` is the sequence's table, and `from` the first of these tokens. Does not
  // lock. Requires: the caller uses the blocks and is the only writer there.
  void add_written(std::span<const int32_t> blocks, int from, int n);
  // Sets the tokens of these blocks to `n` in all, filled in order.
  void set_written(std::span<const int32_t> blocks, int n);
  int filled(int32_t block) const {  // tokens
    return std::atomic_ref(const_cast<int32_t&>(filled_[size_t(block)])).load(std::memory_order_relaxed);
  }

  // Gives capacity, states, block_tokens, written_bytes and mappings. The rest belongs to a KvMemory.
  virtual KvStats stats() const = 0;
  std::vector<KvState> states() const;  // of each block; locks for a part of them at a time
  // `listener` is told what the prefix cache finds from now on, and what it loses. Requires: an unused pool.
  virtual void tell(std::shared_ptr<CacheListener>) {}
  virtual void clear_prefix_cache() {}  // cached blocks become free

  // Recounts the pool against one user's references and holds, [n_blocks] each, and aborts on a difference. `complete`:
  // the user is the only one, so that counts must be equal; otherwise they are a lower bound.
  virtual void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                                bool complete) const = 0;

 protected:
  // A lock that spins before it parks. Critical sections last a few microseconds at most, and waking a parked thread on
  // another core costs tens of them.
  class Lock {
   public:
    explicit Lock(std::mutex& mutex) : mutex_(mutex) {
      for (int spin = 0; spin < 500; ++spin) {
        if (mutex_.try_lock()) return;
        cpu_relax();
      }
      mutex_.lock();
    }
    ~Lock() { mutex_.unlock(); }
    Lock(const Lock&) = delete;

   private:
    std::mutex& mutex_;
  };

  struct Users {  // users of one block
    int32_t references = 0;
    int16_t leases = 0, handovers = 0;  // holds
    bool held() const { return leases > 0 || handovers > 0; }
    bool any() const { return references > 0 || held(); }
  };

  KvPool(KvPlaces places, size_t block_bytes);
  // Says where the implementation keeps the Users of each block, [n_blocks]. Requires: the pool has not been used yet.
  void users_at(Users* first, size_t stride) { users_ = reinterpret_cast<std::byte*>(first), stride_ = stride; }
  Users& of(int32_t block) const { return *reinterpret_cast<Users*>(users_ + size_t(block) * stride_); }

  // The functions below are called under the lock.
  // A block comes into use, or has gone out of it. Both calls update n_cached_.
  virtual void begin_use(int32_t block) = 0;
  virtual void end_use(int32_t block) = 0;
  virtual bool cached(int32_t block) const = 0;  // requires: it is not in use
  void add_reference(int32_t block);
  void drop_reference(int32_t block);
  int n_free() const { return n_blocks_ - count_[kActive] - count_[kInTransfer] - n_cached_; }
  // The first part of check_invariants(): checks users and written tokens against one user's.
  void check_uses(std::span<const int32_t> references, std::span<const int32_t> leases, bool complete) const;
  KvStats count() const;  // everything in stats() that needs no implementation

  const KvPlaces places_;
  const int n_blocks_, block_tokens_;
  const size_t block_bytes_;
  std::vector<int32_t> filled_;  // [n_blocks] tokens
  mutable std::mutex mutex_;
  int n_cached_ = 0;
  int64_t written_ = 0;  // tokens in blocks in use, counted under the lock

 private:
  enum State : int { kUnused, kActive, kInTransfer, kStates };
  static State state(const Users& users) {
    return users.held() ? kInTransfer : users.references > 0 ? kActive : kUnused;
  }
  template <class F>
  void change(int32_t block, F&& f);

  std::byte* users_ = nullptr;
  size_t stride_ = 0;
  int count_[kStates] = {};
  std::atomic<int64_t> written_outside_{0};  // tokens, counted without the lock
};

}  // namespace xpyd::allocator
