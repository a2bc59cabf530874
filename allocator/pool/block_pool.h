// BlockPool: blocks with addresses, counted by KvPool; those that nobody needs are free, with the source of blocks
// (block_source.h), or cached: the index (prefix_cache.h) finds them, and the least recently used goes when room is
// wanted (PagedAttention, SOSP'23 section 4.2; vLLM V1's block_pool.py). One may serve several KvMemory on several
// threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "allocator/kv_pool.h"
#include "allocator/pool/block_source.h"
#include "allocator/prefix/prefix_index.h"
#include "allocator/prefix/radix_tree.h"
#include "base/memory.h"

namespace xpyd::allocator {

class BlockPool final : public KvPool {
 public:
  // `share`: of all that is held here, cached blocks may be among so many: beyond, they go. `hash_mask`,
  // `proof_tokens`: see PrefixIndex; `radix`: its blocks are found by a RadixTree instead.
  BlockPool(KvPlaces places, bool prefix_cache, std::unique_ptr<BlockSource> source, int share = INT_MAX,
            uint64_t hash_mask = ~uint64_t{0}, int proof_tokens = INT_MAX, bool radix = false);

  const BlockSource& source() const { return *source_; }
  const PrefixCache* index() const { return index_.get(); }  // null without; unlocked: tests, benches

  // Appends n blocks of one reference each to `out`: free ones first, then cached ones, least recently used first; adds
  // the number of those to `evictions`. Of the n, `drawn` were set aside for the caller. False: fewer than n are
  // available, and nothing has changed. (Of several processes: cached blocks that others hold, too, are not available.)
  [[nodiscard]] bool allocate(int n, std::vector<int32_t>& out, int64_t& evictions, int drawn = 0);

  // Sets n of the blocks that are available aside, or, below 0, gives them back: a number, no blocks. False: fewer are,
  // and nothing has changed. (Another process may take them all the same: then an allocation of them fails.)
  [[nodiscard]] bool reserve(int n);

  [[nodiscard]] bool adopt(const KvHandover& handover) override;
  void discard(const KvHandover& handover) override;

  // Tokens of the longest indexed prefix, at most max_tokens. Does not touch the LRU order.
  int match(std::span<const int32_t> tokens, uint64_t salt, int max_tokens) const;
  // The same, and its blocks are appended to `out` with a reference each; `chain` becomes the end of its full blocks. A
  // last one that it fills in part may hold more than that, and be another's who writes there.
  int acquire(std::span<const int32_t> tokens, uint64_t salt, int max_tokens, std::vector<int32_t>& out,
              PrefixChain& chain);
  // PrefixCache::add().
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain);
  int indexed_tokens(int32_t block) const;  // PrefixCache::tokens_in()
  void tell(std::shared_ptr<CacheListener> listener) override;
  void clear_prefix_cache() override;

  KvStats stats() const override;
  void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                        bool complete) const override;

  // Fills every newly allocated block with NaN, so that KV read before it is written cannot look
  // right. On by default in sanitizer builds. Before any use.
  void poison_new_blocks(bool on) { poison_ = on; }

  // Memory of a pool beside its KV bytes.
  static size_t metadata_bytes(const KvLayout& layout, bool prefix_cache);

 private:
  struct Block {  // 32 bytes: two in a cache line, with what the index asks of it
    PrefixCache::Node node;
    Users users;
    int32_t older, newer;  // neighbours in the LRU list while cached; -1: end
  };

  int64_t begin_use(std::span<const int32_t> blocks) override;
  int64_t end_use(std::span<const int32_t> blocks) override;
  bool cached(int32_t block) const override { return at(block).node.uid != 0; }
  void sign(KvHandover& handover) override;
  void lru_append(int32_t block);
  void lru_remove(int32_t newest, int32_t oldest);  // all between them, too
  void unlist(int32_t block);                       // out of the LRU list
  void forget(int32_t block);                       // … and out of the index, with what continues it in a tree
  void evict(int32_t block);                        // … and given back
  void lost(int32_t block);                         // the index has dropped it already
  void shed();                                      // cached blocks beyond the share
  int spare() const { return std::min(source_->count_free(), n_free()) + n_cached_ - reserved_; }
  int spared(std::span<const int32_t> tokens, uint64_t salt, int max_tokens) const;
  void poison(int32_t block);
  Block& at(int32_t block) const { return blocks_.as<Block>()[block]; }
  auto locked() const {  // calls what it is given under the lock
    return [this](auto&& f) {
      Lock lock(mutex_);
      f();
    };
  }

  Buffer blocks_;  // Block [n_blocks]
  const std::unique_ptr<BlockSource> source_;
  const int share_;
  std::unique_ptr<PrefixCache> index_;
  int32_t oldest_ = -1, newest_ = -1;  // ends of the LRU list
  std::atomic<int> reserved_{0};  // blocks that are set aside, of the free and the cached ones; changed under the lock
  bool poison_;
};

}  // namespace xpyd::allocator
