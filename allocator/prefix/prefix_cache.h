// PrefixCache: finds the blocks that hold the KV of a prefix, for a pool (BlockPool) and for the tiers below it
// (OffloadTiers). Two classes implement it: PrefixIndex, by the hash of whole blocks, and RadixTree, by a tree of
// tokens, whose prefixes may end within a block. The owner locks what it has found, by its own counts, and says who is
// evicted.
//
// Thread safety: none. match() and insert() are given `locked`, which calls a function under the owner's lock, so that
// hashes are computed without it; all else is called under that lock.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>

#include "allocator/prefix_log.h"

namespace xpyd::allocator {

// The last link of a sequence's chain: what its next full block is chained to. Starts as {hash:
// salt}.
struct PrefixChain {
  uint64_t hash = 0;    // PrefixIndex: seq[i-1]; the salt before the first block, in a tree always
  uint64_t uid = 0;     // identity of the indexed block at the end; 0 before the first block
  int32_t block = -1;   // that block, perhaps another sequence's with the same content
  bool broken = false;  // that block has been evicted: what follows cannot be found, so is not indexed
  bool first() const { return block < 0; }
};

class PrefixCache {
 public:
  // Identity of an indexed block: a number never given twice, 0 for a block that is not indexed; and where it stands,
  // in the index' own words. Nodes are the owner's: beside what else it keeps of a block, they share its cache line.
  struct Node {
    uint64_t uid = 0;
    uint64_t parent = 0;
  };
  using Locked = std::function<void(const std::function<void()>&)>;
  using Found = std::function<void(std::span<const int32_t>)>;

  virtual ~PrefixCache() = default;
  const int grain;  // a prefix that is found has a multiple of so many tokens: those of a block, or 1

  // The longest indexed prefix of `tokens`, at most max_tokens: returns how many, and advances `chain`, {hash: salt},
  // over its full blocks. found(blocks), locked, for parts of it in order: here the owner locks them, or they may go
  // before the next part. Where it ends within a block that one, whose first tokens they are, comes last.
  virtual int match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
                    const Found& found) const = 0;

  // Makes `tokens`, which follow `chain` and lie in `blocks`, findable, each full block chained to the one before. No
  // de-duplication: a block whose content is indexed already stays unindexed, and the chain goes on from the indexed
  // one. Tokens of a block that is not full do not advance the chain: a later call has them again.
  virtual void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
                      const Locked& locked) = 0;
  virtual void evict(int32_t block) = 0;  // before: it is indexed

  // Tokens of this block that are found, from its first: all, unless a tree has its beginning; 0: it is not indexed.
  virtual int tokens_in(int32_t block) const = 0;

  // What it finds from now on, and what it loses. Before any use.
  virtual void tell(std::shared_ptr<CacheListener>) {}
  virtual void check_invariants() const = 0;

 protected:
  // Nodes are `node_stride` bytes apart, [n_blocks], zeroed.
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

// Of n tokens, those with which both begin. memcmp reads 32 bytes at a time, a loop that may stop anywhere four.
inline int tokens_alike(const int32_t* a, const int32_t* b, int n) {
  constexpr int kStep = 64;
  int same = 0;
  while (same + kStep <= n && std::memcmp(a + same, b + same, kStep * sizeof(int32_t)) == 0) same += kStep;
  while (same < n && a[same] == b[same]) ++same;
  return same;
}

}  // namespace xpyd::allocator
