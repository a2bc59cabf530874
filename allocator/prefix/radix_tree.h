// RadixTree: finds the KV of a prefix to the token, as SGLang's radix cache does, over the blocks of a block table.
//
// An edge is a span of tokens and is cut where two sequences part, at any token. A block of a table begins at a
// multiple of block_tokens of its sequence, so rows that two sequences share before they part within a block are in
// both of their blocks: whoever parts has copied them (paged.cc). From this follow three rules, for a node whose edge
// is tokens [begin, end) of a path:
//   1. Its blocks are those whose last token is on its edge, one for each place in the path. A full block is at the
//      multiple where it ends; a block that is not full is a leaf's last.
//   2. The first tokens of a block may be on edges above: what of an inner node's edge is after its last full block is
//      in the first block of each child.
//   3. Every token of the tree is in a block of the tree; there are no more tokens and no more edges than that.
// So who takes a block out of the tree (evict(): the pool wants its memory) takes everything after its first token
// out of that path, and a node that nothing holds any more. The pool's order of eviction, the tail of the sequence that
// ended longest ago first, has a leaf's last block go before what it continues: leaves by least recent use, of which
// SGLang's evict() takes a whole one, and this as much as is wanted.
//
// Look-up: one binary search for each edge on the way, and a memcmp of its tokens.
//
// Not here: two edges that have become one (the sibling has gone) stay two, as in SGLang.
#pragma once

#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/prefix/prefix_cache.h"

namespace xpyd::allocator {

class RadixTree final : public PrefixCache {
 public:
  static constexpr int kAtOnce = 4096;  // tokens that are compared under one lock: a microsecond

  // Of a node `parent` is edge << 32 | place among its blocks.
  // lost(block), locked: it is found no more, since what it continued has gone or a longer one has all its tokens.
  RadixTree(int n_blocks, int block_tokens, Node* nodes, size_t node_stride, std::function<void(int32_t)> lost);

  int match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
            const Found& found) const override;
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
              const Locked& locked) override;
  void evict(int32_t block) override;
  int tokens_in(int32_t block) const override;
  void check_invariants() const override;

  // Unlocked: for tests and benches.
  int64_t size() const { return tokens_; }  // tokens on all edges
  int n_edges() const { return int(edges_.size() - unused_.size()); }

 private:
  struct Edge {
    std::vector<int32_t> tokens;                        // [begin, end) of the path
    std::vector<int32_t> blocks;                        // by place: the first one is that with token `begin`
    std::vector<std::pair<int32_t, int32_t>> children;  // {first token, edge}, by token
    uint64_t salt = 0;                                  // of a root, whose edge is empty
    int32_t parent = -1;                                // -1: a root, or not in use
    int begin = 0;
    int end() const { return begin + int(tokens.size()); }
  };
  struct Place {  // after token `depth` of a path; edge -1: there is none
    int32_t edge;
    int depth;
  };

  Edge& edge(int32_t id) { return edges_[size_t(id)]; }
  const Edge& edge(int32_t id) const { return edges_[size_t(id)]; }
  Place end_of(const PrefixChain& chain) const;
  int32_t child_of(const Edge& from, int32_t token) const;
  Place descend(Place from, std::span<const int32_t> tokens, const Found* found) const;
  int32_t block_with(Place end) const;
  void advance(PrefixChain& chain, Place end) const;
  int32_t make_edge(int32_t parent, int begin);
  void remove_edge(int32_t id);
  int32_t split(int32_t id, int depth);
  void put(int32_t id, std::span<const int32_t> blocks);
  void extend(Place from, std::span<const int32_t> tokens, std::span<const int32_t> blocks);
  void lose(int32_t block);
  void cut(int32_t id, int depth);

  const std::function<void(int32_t)> lost_;
  std::deque<Edge> edges_;
  std::vector<int32_t> unused_;                  // of edges_
  std::unordered_map<uint64_t, int32_t> roots_;  // by salt
  uint64_t next_uid_ = 1;
  int64_t tokens_ = 0;
};

}  // namespace xpyd::allocator
