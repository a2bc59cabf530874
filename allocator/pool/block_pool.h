// BlockPool: a KvPool of blocks with addresses. A block that nobody uses is either free, in the free list, or cached:
// the prefix cache still finds it, and the least recently used one is evicted when memory is wanted (PagedAttention,
// SOSP'23 section 4.2; vLLM V1's block_pool.py). One pool may serve several KvMemory on several threads.
#pragma once

#include "allocator/kv_pool.h"
#include "allocator/prefix/prefix_index.h"
#include "allocator/prefix/radix_tree.h"
#include "base/memory.h"

namespace xpyd::allocator {

// A list of free blocks. The last one freed goes out first; a new list is in ascending order, so that copies join.
class FreeList {
 public:
  explicit FreeList(int n_blocks) : free_(size_t(n_blocks)) {
    for (int i = 0; i < n_blocks; ++i) free_[size_t(i)] = n_blocks - 1 - i;
  }
  // Appends up to n blocks to `out`.
  void claim(size_t n, std::vector<int32_t>& out) {
    const size_t keep = free_.size() - std::min(free_.size(), n);
    out.insert(out.end(), free_.rbegin(), free_.rend() - ptrdiff_t(keep));
    free_.resize(keep);
  }
  void release(int32_t block) { free_.push_back(block); }
  // Aborts unless exactly the marked blocks ([n_blocks]) are not in the list.
  void check_invariants(std::span<const char> held) const {
    std::vector<char> free(held.size(), 0);
    for (int32_t block : free_) XPYD_CHECK(!free[size_t(block)]++, "free list");
    for (size_t block = 0; block < held.size(); ++block) XPYD_CHECK(free[block] != held[block]);
  }

 private:
  std::vector<int32_t> free_;  // the next one to go out is at the end
};

class BlockPool final : public KvPool {
 public:
  // `hash_mask` and `proof_tokens`: see PrefixIndex. `radix`: a RadixTree is the prefix cache instead.
  BlockPool(KvPlaces places, bool prefix_cache, uint64_t hash_mask = ~uint64_t{0}, int proof_tokens = INT_MAX,
            bool radix = false);

  const PrefixCache* index() const { return index_.get(); }  // null: no prefix cache; unlocked, for tests and benches

  // Appends n blocks with one reference each to `out`: first free ones, then cached ones, least recently used first.
  // Adds the number of evicted ones to `evictions`. `drawn` of the n come from the caller's reserved blocks. False:
  // fewer than n are available, and no block was taken.
  [[nodiscard]] bool allocate(int n, std::vector<int32_t>& out, int64_t& evictions, int drawn = 0);

  // Reserves n of the available blocks; n < 0 gives reserved ones back. It is a number, not particular blocks. False:
  // fewer are available, and nothing has changed.
  [[nodiscard]] bool reserve(int n);

  // Returns the tokens of the longest indexed prefix, at most max_tokens. Leaves the LRU order as it is.
  int match(std::span<const int32_t> tokens, uint64_t salt, int max_tokens) const;
  // Like match(), and appends the prefix's blocks to `out` with a reference each. `chain` becomes the end of its full
  // blocks. If the prefix ends within the last block, that block may hold more tokens, and another sequence may write
  // there. While blocks are reserved, the prefix takes at most as many blocks as are not, or an append of reserved
  // blocks could fail.
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

  // Fills every newly allocated block with NaN, so that reading KV before it is written gives a wrong result. Requires:
  // the pool has not been used yet.
  void poison_new_blocks(bool on) { poison_ = on; }
  static bool poison_by_default;  // of pools that are made later: true in every build but release; tests set it

  // Bytes of a pool's own tables, besides its KV.
  static size_t metadata_bytes(const KvLayout& layout, bool prefix_cache);

 private:
  struct Block {  // 32 bytes, so two in a cache line, with the fields that the index reads
    PrefixCache::Node node;
    Users users;
    int32_t older, newer;  // neighbours in the LRU list while cached; -1: end of the list
  };

  void begin_use(int32_t block) override {
    if (cached(block)) unlist(block);
  }
  void end_use(int32_t block) override;
  bool cached(int32_t block) const override { return at(block).node.uid != 0; }
  int spare() const { return n_free() + n_cached_ - reserved_; }
  void unlist(int32_t block);  // takes it out of the LRU list
  void evict(int32_t block);   // takes it out of the list and the index, with all that continues it in a tree; frees it
  void lost(int32_t block);    // frees it; the index has dropped it already
  void poison(int32_t block);
  Block& at(int32_t block) const { return blocks_.as<Block>()[block]; }
  auto locked() const {  // calls its argument under the lock
    return [this](auto&& f) {
      Lock lock(mutex_);
      f();
    };
  }

  Buffer blocks_;  // Block [n_blocks]
  FreeList free_;
  std::unique_ptr<PrefixCache> index_;
  int32_t oldest_ = -1, newest_ = -1;  // ends of the LRU list
  int reserved_ = 0;                   // reserved blocks, among the free and cached ones
  bool poison_ = poison_by_default;
};

}  // namespace xpyd::allocator
