// BlockPool: a KvPool of blocks with addresses. A block that nobody uses is either free, in its BlockSource, or cached:
// the prefix cache still finds it, and the least recently used one is evicted when memory is wanted (PagedAttention,
// SOSP'23 section 4.2; vLLM V1's block_pool.py). One pool may serve several KvMemory on several threads.
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
  // `share`: once this pool holds more blocks than this, it evicts cached ones. `hash_mask` and `proof_tokens`: see
  // PrefixIndex. `radix`: a RadixTree is the prefix cache instead.
  BlockPool(KvPlaces places, bool prefix_cache, std::unique_ptr<BlockSource> source, int share = INT_MAX,
            uint64_t hash_mask = ~uint64_t{0}, int proof_tokens = INT_MAX, bool radix = false);

  const BlockSource& source() const { return *source_; }
  const PrefixCache* index() const { return index_.get(); }  // null: no prefix cache; unlocked, for tests and benches

  // Appends n blocks with one reference each to `out`: first free ones, then cached ones, least recently used first.
  // Adds the number of evicted ones to `evictions`. `drawn` of the n come from the caller's reserved blocks. False:
  // fewer than n are available, and no block was taken. Cached blocks that other processes hold as well are not
  // available.
  [[nodiscard]] bool allocate(int n, std::vector<int32_t>& out, int64_t& evictions, int drawn = 0);

  // Reserves n of the available blocks; n < 0 gives reserved ones back. It is a number, not particular blocks. False:
  // fewer are available, and nothing has changed. Another process may still take them; then allocate() fails.
  [[nodiscard]] bool reserve(int n);

  [[nodiscard]] bool adopt(const KvHandover& handover) override;
  void discard(const KvHandover& handover) override;

  // Returns the tokens of the longest indexed prefix, at most max_tokens. Leaves the LRU order as it is.
  int match(std::span<const int32_t> tokens, uint64_t salt, int max_tokens) const;
  // Like match(), and appends the prefix's blocks to `out` with a reference each. `chain` becomes the end of its full
  // blocks. If the prefix ends within the last block, that block may hold more tokens, and another sequence may write
  // there.
  int acquire(std::span<const int32_t> tokens, uint64_t salt, int max_tokens, std::vector<int32_t>& out,
              PrefixChain& chain);
  // See PrefixCache::insert().
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain);
  int indexed_tokens(int32_t block) const;  // see PrefixCache::tokens_in()
  void tell(std::shared_ptr<CacheListener> listener) override;
  void clear_prefix_cache() override;

  KvStats stats() const override;
  void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                        bool complete) const override;

  // Fills every newly allocated block with NaN, so that reading KV before it is written gives a wrong result. On by
  // default in every build but release. Requires: the pool has not been used yet.
  void poison_new_blocks(bool on) { poison_ = on; }

  // Bytes of a pool's own tables, besides its KV.
  static size_t metadata_bytes(const KvLayout& layout, bool prefix_cache);

 private:
  struct Block {  // 32 bytes, so two in a cache line, with the fields that the index reads
    PrefixCache::Node node;
    Users users;
    int32_t older, newer;  // neighbours in the LRU list while cached; -1: end of the list
  };

  int64_t begin_use(std::span<const int32_t> blocks) override;
  int64_t end_use(std::span<const int32_t> blocks) override;
  bool cached(int32_t block) const override { return at(block).node.uid != 0; }
  void sign(KvHandover& handover) override;
  void lru_append(int32_t block);
  void lru_remove(int32_t newest, int32_t oldest);  // and all blocks between them
  void unlist(int32_t block);                       // takes it out of the LRU list
  void forget(int32_t block);  // takes it out of the list and the index, with all that continues it in a tree
  void evict(int32_t block);   // forget(), and gives it back to the source
  void lost(int32_t block);    // the index has dropped it already
  void shed();                 // evicts cached blocks beyond the share
  int spare() const { return std::min(source_->count_free(), n_free()) + n_cached_ - reserved_; }
  int spared(std::span<const int32_t> tokens, uint64_t salt, int max_tokens) const;
  void poison(int32_t block);
  Block& at(int32_t block) const { return blocks_.as<Block>()[block]; }
  auto locked() const {  // calls its argument under the lock
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
  std::atomic<int> reserved_{0};       // reserved blocks, among the free and cached ones; changed under the lock
  bool poison_;
};

}  // namespace xpyd::allocator
