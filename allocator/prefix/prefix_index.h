// PrefixIndex: the prefix cache of vLLM V1. It finds the block that holds the KV of these tokens, after that prefix,
// under this salt.
//
// The key of a block is its chained hash (prefix_hash.h). The key only says where to look; each hit is proved. The
// block's tokens are compared, and so is the identity of the block before it (for a first block, the salt). By
// induction the whole prefix is equal.
//
// The table has a fixed size, open addressing, linear probing, a load of at most 1/2, and erases by shifting back,
// without tombstones. An entry is 8 bytes, half of the key and the block, because each look-up in a large table misses
// the caches. If two keys agree in that half, the proof decides. A look-up runs in passes over a batch so that cache
// misses overlap: it hashes and prefetches the table entries, reads them and prefetches the blocks that they name, then
// compares.
//
// Thread safety: none, except hash_batch(). The owner (BlockPool, OffloadTiers) locks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "allocator/prefix/prefix_cache.h"
#include "allocator/prefix/prefix_hash.h"
#include "base/memory.h"

namespace xpyd::allocator {

class PrefixIndex : public PrefixCache {
 public:
  static constexpr int kBatch = 64;  // blocks whose cache misses overlap
  static constexpr int kFirst = 8;   // blocks in a match's first batch: most prompts without a hit need no more hashes

  // In a node, an identity has its lowest bit set for a first block. `parent` is the identity of the block before it;
  // for a first block it is the salt. `hash_mask` is ANDed to every key; tests narrow it to force collisions.
  // `proof_tokens`: the number of a block's first tokens that are stored and compared. Fewer than all are allowed only
  // if they determine the others.
  PrefixIndex(int n_blocks, int block_tokens, uint64_t hash_mask, int proof_tokens, Node* nodes, size_t node_stride);

  void tell(std::shared_ptr<CacheListener> listener) override { listeners_.push_back(std::move(listener)); }

  // ---- Several whole blocks at once. Hashes are computed outside the lock.

  int match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
            const Found& found) const override;
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
              const Locked& locked) override;

  // ---- Called under the owner's lock.

  // Computes seq[] of n <= kBatch blocks that follow `before` (the salt, if `first`), and prefetches their table
  // entries. Any thread; needs no lock.
  void hash_batch(uint64_t before, bool first, const int32_t* tokens, int n, uint64_t* hashes) const;

  // Looks up the n <= kBatch hashes up to the first without an entry, and returns how many have one. `blocks` receives
  // an unproved block for each. Prefetches what prove() reads.
  int candidates(const uint64_t* hashes, int n, int32_t* blocks) const;

  // Finds the longest run of indexed blocks that follow `chain`, at most n, and returns its length. `blocks` comes from
  // candidates() and is corrected, because the index may have changed since. Advances `chain` over the run.
  int prove(PrefixChain& chain, const int32_t* tokens, int n, const uint64_t* hashes, int32_t* blocks) const;

  // Returns the block with these tokens after this chain, or -1.
  int32_t find(const PrefixChain& chain, uint64_t hash, const int32_t* tokens) const;
  // Returns a block with this key, whatever its content and its parent, or -1.
  int32_t find_key(uint64_t hash) const;

  // Requires: `block` is not indexed, find() returns -1, and the chain is intact().
  void insert(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);
  void evict(int32_t block) override;
  int tokens_in(int32_t block) const override { return contains(block) ? block_tokens_ : 0; }

  // `block` is indexed after a parent that has since been evicted, and `chain` ends with the same prefix computed
  // again. Makes the block findable after `chain`. Requires: find() returns -1.
  void reattach(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);

  void advance(PrefixChain& chain, uint64_t hash, int32_t block) const {
    chain.hash = hash, chain.uid = node(block).uid, chain.block = block;
  }
  bool contains(int32_t block) const { return node(block).uid != 0; }
  bool intact(const PrefixChain& chain) const {
    return !chain.broken && (chain.first() || node(chain.block).uid == chain.uid);
  }
  // True if indexed block `next` was indexed after `block`, and that one has not been evicted since.
  bool follows(int32_t next, int32_t block) const {
    return !(node(next).uid & 1) && contains(block) && node(next).parent == node(block).uid;
  }
  const int32_t* tokens_of(int32_t block) const {
    return tokens_.as<int32_t>() + size_t(block) * size_t(proof_tokens_);
  }
  int size() const { return size_; }

  // Looks in the table alone, without proof: returns most likely the block, or -1. The bench compares prove() with it.
  int32_t slot_block(uint64_t hash) const;

  // Recounts that every entry is reachable from its home slot, every node is in the table once, and every key is right.
  void check_invariants() const override;

  static size_t metadata_bytes(int n_blocks, int block_tokens);

 private:
  struct Entry {
    uint32_t tag;          // the lower half of the key; its lowest bits give the home slot
    int32_t block_plus_1;  // 0: empty
  };
  Entry* table() const { return table_.as<Entry>(); }
  void add_one(PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);
  uint64_t key(uint64_t hash) const { return hash & hash_mask_; }
  uint64_t& key_of(int32_t block) const { return keys_.as<uint64_t>()[block]; }
  static uint32_t tag(uint64_t key) { return uint32_t(key); }
  size_t home(uint64_t key) const { return size_t(tag(key)) & slot_mask_; }
  bool is_after(int32_t block, const PrefixChain& chain) const;
  bool same_tokens(int32_t block, const int32_t* tokens) const;

  int proof_tokens_;
  uint64_t hash_mask_;
  size_t slot_mask_;
  int size_ = 0;
  uint64_t next_uid_ = 1;
  std::vector<std::shared_ptr<CacheListener>> listeners_;
  Buffer table_;   // Entry [slot_mask_ + 1]
  Buffer keys_;    // uint64_t [n_blocks]: the key of each indexed block
  Buffer tokens_;  // int32_t [n_blocks, proof_tokens]: valid for indexed blocks
};

}  // namespace xpyd::allocator
