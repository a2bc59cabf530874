// KvPool: equal blocks of KV memory that several memories draw from, and who needs each: what all
// schemes have in common. What a block is, who gets one, and what becomes of one that nobody needs,
// says the implementation: BlockPool (paged, contiguous, slots) or PageGroupRows (vattention).
//
// A block is in one state:
//   in_transfer  held by a lease or a hand-over
//   active       referenced by a sequence, not held
//   cached       neither, and the implementation keeps what it holds, until somebody wants the room
//   free         none of these
// In use, in one of the first two, it is filled with written tokens: stats() knows what of the pool
// holds KV, a block that several sequences share counted once.
//
// Thread safety: every function locks for itself, and stats() is a consistent snapshot. KV bytes
// are not locked: only a block's owner writes it, at tokens that nobody else reads yet.
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
  // Where the blocks are: on every rank a block has its bytes at the same number.
  const KvPlaces& places() const { return places_; }
  const KvLayout& layout() const { return places_.whole; }
  std::byte* data() const { return places_.base(0); }
  size_t block_bytes() const { return block_bytes_; }  // on all ranks

  // One reference more of each. Before: none of them is free.
  void add_references(std::span<const int32_t> blocks);
  // Drops one reference of each, the last block first, so that tails become the oldest of an LRU.
  void release(std::span<const int32_t> blocks);
  // Sequences that may write after the tokens of this block: references and hand-overs, leases not.
  int users(int32_t block) const;
  // One, and no lease: also who has given a sequence up may hold one, under which a peer still writes.
  bool alone(int32_t block) const;
  // A lease's hold: beyond references. Before: they are in use.
  void hold(std::span<const int32_t> blocks);
  void unhold(std::span<const int32_t> blocks);

  // One reference of each block becomes a hold of the hand-over, and a reference again (adopt) or nothing (discard).
  void begin_handover(KvHandover& handover);
  // False: another process's blocks, which it does not hold any more; nothing has changed.
  [[nodiscard]] virtual bool adopt(const KvHandover& handover);
  virtual void discard(const KvHandover& handover);

  // The last of `blocks` hold the KV of n more tokens, which begin at token `from` of them all.
  // Does not lock. Before: the caller uses them, and is the only one who writes there.
  void add_written(std::span<const int32_t> blocks, int from, int n);
  // The blocks hold `n` tokens together and no more.
  void set_written(std::span<const int32_t> blocks, int n);
  int filled(int32_t block) const {  // tokens
    return std::atomic_ref(const_cast<int32_t&>(filled_[size_t(block)])).load(std::memory_order_relaxed);
  }

  // capacity, states, block_tokens, written_bytes and mappings; the rest belongs to a KvMemory
  virtual KvStats stats() const = 0;
  std::vector<KvState> states() const;  // of each block; locked for a part of them at a time
  // What a prefix index finds from now on, and what it loses. Before any use.
  virtual void tell(std::shared_ptr<CacheListener>) {}
  virtual void clear_prefix_cache() {}  // cached blocks become free

  // Recounts the pool against one user's references and holds ([n_blocks] each). `complete`: they
  // are all there are, and must be equal; otherwise they are a lower bound. Aborts on a difference.
  virtual void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                                bool complete) const = 0;

 protected:
  // Critical sections last a few microseconds at most, while parking a thread and waking it across
  // cores costs tens of them: a waiter spins for about that long before it parks.
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

  struct Users {  // of a block
    int32_t references = 0;
    int16_t leases = 0, handovers = 0;  // that hold it
    bool held() const { return leases > 0 || handovers > 0; }
    bool any() const { return references > 0 || held(); }
  };

  KvPool(KvPlaces places, size_t block_bytes);
  // Before any use: they stand among what the implementation keeps of each block, [n_blocks].
  void users_at(Users* first, size_t stride) { users_ = reinterpret_cast<std::byte*>(first), stride_ = stride; }
  Users& of(int32_t block) const { return *reinterpret_cast<Users*>(users_ + size_t(block) * stride_); }

  // Locked, all of these.
  // Blocks that nobody used come into use, or go out of it, in this order. Gives the tokens that they hold, and keeps
  // n_cached_ right.
  virtual int64_t begin_use(std::span<const int32_t> blocks) = 0;
  virtual int64_t end_use(std::span<const int32_t> blocks) = 0;
  virtual bool cached(int32_t block) const = 0;         // of one that is not in use
  virtual void sign(KvHandover&) {}                     // at its begin
  void add_reference(std::span<const int32_t> blocks);  // of each
  void add_reference(int32_t block) { add_reference({&block, 1}); }
  void drop_reference(int32_t block);
  int n_free() const { return n_blocks_ - count_[kActive] - count_[kInTransfer] - n_cached_; }
  // Uses, and tokens written, against one user's, as check_invariants(): the first of what that does.
  void check_uses(std::span<const int32_t> references, std::span<const int32_t> leases, bool complete) const;
  KvStats count() const;  // all that stats() says of a pool on its own

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
  void change(std::span<const int32_t> blocks, F&& f);
  template <class F>
  void change(int32_t block, F&& f) {
    change({&block, 1}, f);
  }

  std::byte* users_ = nullptr;
  size_t stride_ = 0;
  int count_[kStates] = {};
  std::atomic<int64_t> written_outside_{0};  // tokens, counted without the lock
};

}  // namespace xpyd::allocator
