// KvPool: equal blocks of KV memory that several memories draw from, as what all schemes have in
// common sees them. What a block is, and who gets one, says the implementation: BlockPool (paged,
// contiguous, slots) or RowPool (vattention).
//
// A block in use, referenced by a sequence or held by a lease, is filled with written tokens:
// stats() knows what of the pool holds KV, a block that several sequences share counted once.
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

namespace xpyd {

class PrefixLog;  // prefix_log.h

class KvPool {
 public:
  virtual ~KvPool() = default;
  // Where the blocks are: on every rank a block has its bytes at the same number.
  const KvPlaces& places() const { return places_; }
  const KvLayout& layout() const { return places_.whole; }
  std::byte* data() const { return places_.base(0); }
  size_t block_bytes() const { return block_bytes_; }  // on all ranks

  // Drops one reference of each, the last block first.
  virtual void release(std::span<const int32_t> blocks) = 0;
  // Sequences that may write after the tokens of this block: references and hand-overs, leases not.
  virtual int users(int32_t block) const = 0;
  // A lease's hold: beyond references.
  virtual void hold(std::span<const int32_t> blocks) = 0;
  virtual void unhold(std::span<const int32_t> blocks) = 0;

  // One reference of each block becomes a hold of the hand-over, and a reference again (adopt) or
  // nothing (discard).
  virtual void begin_handover(KvHandover& handover) = 0;
  // False: another process's blocks, which it does not hold any more; nothing has changed.
  [[nodiscard]] virtual bool adopt(const KvHandover& handover) = 0;
  virtual void discard(const KvHandover& handover) = 0;

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
  // What a prefix index finds from now on, and what it loses. Before any use.
  virtual void log_index(std::shared_ptr<PrefixLog>) {}
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

  KvPool(KvPlaces places, size_t block_bytes);
  virtual bool in_use(int32_t block) const = 0;  // locked
  // A block with so many tokens comes into use, or goes out of it (negative). Locked.
  void count_written(int tokens) { written_ += tokens; }
  void check_written(bool complete) const;  // against in_use(). Locked
  KvStats new_stats() const;                // capacity, block_tokens, written_bytes. Locked

  const KvPlaces places_;
  const int n_blocks_, block_tokens_;
  const size_t block_bytes_;
  std::vector<int32_t> filled_;  // [n_blocks] tokens
  mutable std::mutex mutex_;

 private:
  int64_t written_ = 0;                      // tokens in blocks in use, counted under the lock
  std::atomic<int64_t> written_outside_{0};  // and without
};

}  // namespace xpyd
