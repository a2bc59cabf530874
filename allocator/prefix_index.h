// PrefixIndex: finds the block that holds the KV of "these tokens, after that prefix, under this salt".
//
// Key of a block (Mooncake RFC #1527, which Dynamo's router shares):
//   local[i] = XXH3_64(tokens of block i, little-endian u32),  seq[0] = local[0],
//   seq[i] = XXH3_64(seq[i-1] || local[i]);  a salt other than 0 enters as seq[-1] = salt.
// The hash only says where to look. A hit is proved: the block's tokens are compared, and so is the
// identity of the block before it (or the salt, for the first), so by induction the whole prefix is
// equal.
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

#include "allocator/prefix_log.h"
#include "base/memory.h"

namespace xpyd::allocator {

// The last link of a sequence's chain: what its next full block is chained to. Starts as {hash:
// salt}.
struct PrefixChain {
  uint64_t hash = 0;    // seq[i-1]; the salt before the first block
  uint64_t uid = 0;     // identity of the indexed block at the end; 0 before the first block
  int32_t block = -1;   // that block, perhaps another sequence's with the same content
  bool broken = false;  // that block has been evicted: what follows cannot be found, so is not indexed
  bool first() const { return block < 0; }
};

class PrefixIndex {
 public:
  static constexpr int kBatch = 64;  // blocks whose cache misses overlap
  static constexpr int kFirst = 8;   // … of a walk's first batch: most that find nothing need not hash more

  // Identity of an indexed block: a number never given twice, its lowest bit set for a first block,
  // 0 for a block that is not indexed; and the identity before it, or the salt for a first block.
  struct Node {
    uint64_t uid = 0;
    uint64_t parent = 0;
  };

  // Nodes are the owner's, `node_stride` bytes apart, [n_blocks], zeroed: beside what else it keeps of a block, they
  // share its cache line. `hash_mask` is ANDed to every key: a test narrows it to force collisions. `proof_tokens`: of
  // a block so many of its first tokens are kept, and prove a hit; fewer than all only where they determine the others.
  PrefixIndex(int n_blocks, int block_tokens, uint64_t hash_mask, int proof_tokens, Node* nodes, size_t node_stride);

  // What it finds from now on, and what it loses. Before any use.
  void tell(std::shared_ptr<CacheListener> listener) { listeners_.push_back(std::move(listener)); }

  // ---- Of several blocks. Hashes are computed unlocked: what looks at the table is given to
  // `locked`, which calls it under the owner's lock.

  // The longest indexed prefix of `tokens` after `chain`, at most max_blocks: returns how many, and
  // advances `chain`. found(blocks), locked, for each batch of it.
  template <class Locked, class Found>
  int walk(std::span<const int32_t> tokens, int max_blocks, PrefixChain& chain, Locked&& locked, Found&& found) const {
    // Software pipeline: while the blocks of one batch are fetched, the next batch is hashed.
    const size_t stride = size_t(block_tokens_);
    uint64_t hashes[2][kBatch];
    int32_t blocks[kBatch];
    int n = std::min(kFirst, max_blocks), done = 0;
    if (n <= 0) return 0;
    hash_batch(chain.hash, true, tokens.data(), n, hashes[0]);
    for (int turn = 0; n > 0; turn ^= 1) {
      int first = 0, matched = 0;
      locked([&] { first = candidates(hashes[turn], n, blocks); });
      const int n_next = first < n ? 0 : std::min(kBatch, max_blocks - done - n);
      if (n_next > 0)
        hash_batch(hashes[turn][n - 1], false, tokens.data() + size_t(done + n) * stride, n_next, hashes[turn ^ 1]);
      locked([&] {
        matched = match(chain, tokens.data() + size_t(done) * stride, first, hashes[turn], blocks);
        found(std::span<const int32_t>(blocks, size_t(matched)));
      });
      done += matched;
      if (matched < n) break;
      n = n_next;
    }
    return done;
  }

  // Makes the full blocks [blocks.size()] of `tokens` [blocks.size() * block_tokens] findable, each
  // chained to the one before. No de-duplication: a block whose content is indexed already stays
  // unindexed, and the chain goes on from the indexed one.
  template <class Locked>
  void add(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain, Locked&& locked) {
    uint64_t hashes[kBatch];
    for (size_t done = 0; done < blocks.size() && !chain.broken;) {
      const int32_t* next = tokens.data() + done * size_t(block_tokens_);
      const int n = int(std::min<size_t>(kBatch, blocks.size() - done));
      hash_batch(chain.hash, chain.first(), next, n, hashes);
      locked([&] {
        for (int i = 0; i < n && !chain.broken; ++i, next += block_tokens_)
          add(chain, hashes[i], next, blocks[done + size_t(i)]);
      });
      done += size_t(n);
    }
  }

  // ---- Locked.

  // seq[] of n <= kBatch blocks that follow `before` (the salt, if they are the first); starts
  // fetching their slots. Any thread.
  void hash_batch(uint64_t before, bool first, const int32_t* tokens, int n, uint64_t* hashes) const;

  // Blocks that stand under the n <= kBatch hashes, up to the first that has none: returns how
  // many. Starts fetching what match() will look at.
  int candidates(const uint64_t* hashes, int n, int32_t* blocks) const;

  // The longest run of indexed blocks that follow `chain`, at most n: returns its length, corrects
  // `blocks` (the candidates; things may have happened since), and advances `chain` over them.
  int match(PrefixChain& chain, const int32_t* tokens, int n, const uint64_t* hashes, int32_t* blocks) const;

  // The block with these tokens after this chain, or -1.
  int32_t find(const PrefixChain& chain, uint64_t hash, const int32_t* tokens) const;

  // Before: `block` is not indexed, find() is -1, and the chain is intact().
  void insert(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);
  void erase(int32_t block);

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
  const int32_t* tokens_of(int32_t block) const {
    return tokens_.as<int32_t>() + size_t(block) * size_t(proof_tokens_);
  }
  int size() const { return size_; }

  // The table alone, without proof: -1, or most likely the block. The yardstick that the bench reports beside match().
  int32_t slot_block(uint64_t hash) const;

  // Recounts: every entry reachable from its home slot, every node in the table once, keys right.
  void check_invariants() const;

  static size_t metadata_bytes(int n_blocks, int block_tokens);

 private:
  struct Entry {
    uint32_t tag;          // the key's lower half, whose lowest bits are its home
    int32_t block_plus_1;  // 0: empty
  };
  Entry* table() const { return table_.as<Entry>(); }
  Node& node(int32_t block) const { return *reinterpret_cast<Node*>(nodes_ + size_t(block) * node_stride_); }
  void add(PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block);
  uint64_t key(uint64_t hash) const { return hash & hash_mask_; }
  static uint32_t tag(uint64_t key) { return uint32_t(key); }
  size_t home(uint64_t key) const { return size_t(tag(key)) & slot_mask_; }
  bool has(uint64_t key) const;  // some block stands under it
  bool is_after(int32_t block, const PrefixChain& chain) const;
  bool same_tokens(int32_t block, const int32_t* tokens) const;

  int n_blocks_, block_tokens_, proof_tokens_;
  uint64_t hash_mask_;
  size_t slot_mask_;
  int size_ = 0;
  uint64_t next_uid_ = 1;
  std::vector<std::shared_ptr<CacheListener>> listeners_;
  std::byte* nodes_;  // the owner's
  size_t node_stride_;
  Buffer table_;   // Entry [slot_mask_ + 1]
  Buffer keys_;    // uint64_t [n_blocks]: the key under which a block stands
  Buffer tokens_;  // int32_t [n_blocks, proof_tokens], valid where indexed
};

// seq[i] of one block that follows `before` (the salt, if it is the first).
uint64_t prefix_hash(uint64_t before, bool first, const int32_t* tokens, int block_tokens);

// seq[] of the full blocks of `tokens`.
std::vector<uint64_t> prefix_hashes(std::span<const int32_t> tokens, int block_tokens, uint64_t salt);

}  // namespace xpyd::allocator
