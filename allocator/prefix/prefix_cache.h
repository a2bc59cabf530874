// PrefixCache finds the blocks that hold the KV of a prefix. A pool (BlockPool) and the offload tiers below it
// (OffloadTiers) each own one. Two classes implement it: PrefixIndex finds whole blocks by hash, and RadixTree finds a
// prefix to the token. The owner counts the users of what match() finds, and decides which block is evicted.
//
// Thread safety: none. match() and insert() take `locked`, a function that runs its argument under the owner's lock, so
// that hashes are computed outside the lock. Everything else is called under that lock.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>

#include "allocator/prefix_log.h"

namespace xpyd::allocator {

// The end of a sequence's chain of full blocks, to which its next full block is chained. A new chain is {.hash = salt}.
struct PrefixChain {
  uint64_t hash = 0;    // PrefixIndex: the chained hash so far, at first the salt; RadixTree: always the salt
  uint64_t uid = 0;     // identity of the indexed block at the end; 0 before the first block
  int32_t block = -1;   // that block; it may be another sequence's with the same content
  bool broken = false;  // that block has been evicted; later blocks could not be found, so none is indexed
  bool first() const { return block < 0; }
};

class PrefixCache {
 public:
  // `uid` is the identity of an indexed block: it is never given twice, and 0 means that the block is not indexed.
  // `parent` gives its place, in a form that the index defines. The owner stores the nodes beside its own fields of a
  // block, in one cache line.
  struct Node {
    uint64_t uid = 0;
    uint64_t parent = 0;
  };
  using Locked = std::function<void(const std::function<void()>&)>;
  using Found = std::function<void(std::span<const int32_t>)>;

  virtual ~PrefixCache() = default;
  const int grain;  // tokens; match() finds a multiple of it: block_tokens, or 1

  // Finds the longest indexed prefix of `tokens`, at most max_tokens, and returns its length. Advances `chain`, {.hash
  // = salt}, over its full blocks. Calls found(blocks) under the lock, for parts of the prefix in order. The owner must
  // count itself as their user there, or they may be evicted before the next part. If the prefix ends within a block,
  // the last call names a block that begins with those tokens.
  virtual int match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
                    const Found& found) const = 0;

  // Makes `tokens` findable. They follow `chain` and lie in `blocks`; each full block is chained to the one before.
  // There is no de-duplication: if a block's content is indexed already, the block stays unindexed and the chain
  // continues from the indexed one. Tokens of a last block that is not full do not advance the chain, so a later call
  // passes them again.
  virtual void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
                      const Locked& locked) = 0;
  virtual void evict(int32_t block) = 0;  // requires: it is indexed

  // The number of findable tokens of this block, from its first; 0: not indexed. Only a tree may have a part of one.
  virtual int tokens_in(int32_t block) const = 0;

  // `listener` is told what becomes findable from now on, and what no longer is. Requires: nothing is indexed yet.
  virtual void tell(std::shared_ptr<CacheListener>) {}
  virtual void check_invariants() const = 0;

 protected:
  // `nodes`: [n_blocks], zeroed, `node_stride` bytes apart.
  PrefixCache(int tokens, int n_blocks, int block_tokens, Node* nodes, size_t node_stride)
      : grain(tokens),
        n_blocks_(n_blocks),
        block_tokens_(block_tokens),
        nodes_(reinterpret_cast<std::byte*>(nodes)),
        node_stride_(node_stride) {}
  Node& node(int32_t block) const { return *reinterpret_cast<Node*>(nodes_ + size_t(block) * node_stride_); }

  const int n_blocks_, block_tokens_;

 private:
  std::byte* const nodes_;  // the owner's
  const size_t node_stride_;
};

// Returns how many of n tokens are equal from the start. memcmp reads 32 bytes at a time, a loop over tokens only 4.
inline int tokens_alike(const int32_t* a, const int32_t* b, int n) {
  constexpr int kStep = 64;
  int same = 0;
  while (same + kStep <= n && std::memcmp(a + same, b + same, kStep * sizeof(int32_t)) == 0) same += kStep;
  while (same < n && a[same] == b[same]) ++same;
  return same;
}

}  // namespace xpyd::allocator
