// PrefixIndex: finds the block that holds the KV of "these tokens, after that prefix, under this salt".
//
// The key of a block is its chained hash (prefix_hash.h), which only says where to look. A hit is proved: the block's
// tokens are compared, and so is the identity of the block before it (or the salt, for the first), so by induction the
// whole prefix is equal.
//
// Table: open addressing, linear probing, load <= 1/2, erase by shifting back (no tombstones),
// fixed size. A slot is 8 bytes, as every look-up of a large table misses the caches: half of the
// key and the block. Where another key has that half, too, the proof says so. Look-up runs in
// passes over a batch, so that cache misses overlap: hash and prefetch the slots, read the slots and
// prefetch what they name, compare.
//
// Thread safety: none, except hash_batch(); BlockPool locks.
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
  static constexpr int kFirst = 8;   // … of a match's first batch: most that find nothing need not hash more

  // Of a node: an identity has its lowest bit set for a first block;
  // `parent` is the identity before it, or the salt for a first block. `hash_mask` is ANDed to every key: a test
  // narrows it to force collisions. `proof_tokens`: of a block so many of its first tokens are kept, and prove a hit;
  // fewer than all only where they determine the others.
  PrefixIndex(int n_blocks, int block_tokens, uint64_t hash_mask, int proof_tokens, Node* nodes, size_t node_stride);

  void tell(std::shared_ptr<CacheListener> listener) override { listeners_.push_back(std::move(listener)); }

  // ---- Of several blocks; whole ones alone. Hashes are computed unlocked.

  int match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
            const Found& found) const override;
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
              const Locked& locked) override;

  // ---- Locked.

  // seq[] of n <= kBatch blocks that follow `before` (the salt, if they are the first); starts
  // fetching their slots. Any thread.
  void hash_batch(uint64_t before, bool first, const int32_t* tokens, int n, uint64_t* hashes) const;

  // Blocks that stand under the n <= kBatch hashes, up to the first that has none: returns how
  // many. Starts fetching what prove() will look at.
  int candidates(const uint64_t* hashes, int n, int32_t* blocks) const;

  // The longest run of indexed blocks that follow `chain`, at most n: returns its length, corrects
  // `blocks` (the candidates; things may have happened since), and advances `chain` over them.
  int prove(PrefixChain& chain, const int32_t* tokens, int n, const uint64_t* hashes, int32_t* blocks) const;

  // The block with these tokens after this chain, or -1.
  int32_t find(const PrefixChain& chain, uint64_t hash, const int32_t* tokens) const;
  // A block of this key, whatever it holds and is chained to, or -1.
  int32_t find_key(uint64_t hash) const;

  // Before: `block` is not indexed, find() is -1, and the chain is intact().
  void insert(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);
  void evict(int32_t block) override;
  int tokens_in(int32_t block) const override { return contains(block) ? block_tokens_ : 0; }

  // `block` is indexed after a parent that has since been evicted, and this chain ends with the
  // same prefix computed again: makes it findable there. Before: find() is -1.
  void reattach(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);

  void advance(PrefixChain& chain, uint64_t hash, int32_t block) const {
    chain.hash = hash, chain.uid = node(block).uid, chain.block = block;
  }
  bool contains(int32_t block) const { return node(block).uid != 0; }
  bool intact(const PrefixChain& chain) const {
    return !chain.broken && (chain.first() || node(chain.block).uid == chain.uid);
  }
  // Of an indexed block: the one before it was `block` when it was indexed, and still is.
  bool follows(int32_t next, int32_t block) const {
    return !(node(next).uid & 1) && contains(block) && node(next).parent == node(block).uid;
  }
  const int32_t* tokens_of(int32_t block) const {
    return tokens_.as<int32_t>() + size_t(block) * size_t(proof_tokens_);
  }
  int size() const { return size_; }

  // The table alone, without proof: -1, or most likely the block. The yardstick that the bench reports beside prove().
  int32_t slot_block(uint64_t hash) const;

  // Recounts: every entry reachable from its home slot, every node in the table once, keys right.
  void check_invariants() const override;

  static size_t metadata_bytes(int n_blocks, int block_tokens);

 private:
  struct Entry {
    uint32_t tag;          // the key's lower half, whose lowest bits are its home
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
  Buffer keys_;    // uint64_t [n_blocks]: the key under which a block stands
  Buffer tokens_;  // int32_t [n_blocks, proof_tokens], valid where indexed
};

}  // namespace xpyd::allocator
