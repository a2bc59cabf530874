// RadixTree: finds the KV of a prefix to the token, like SGLang's radix cache, over the blocks of a block table.
//
// An edge is a span of tokens. It is cut where two sequences part, at any token. A block of a table begins at a
// multiple of block_tokens of its sequence. If two sequences part within a block, both of their blocks hold the rows
// before that point, because paged.cc copies them. Three rules follow, for a node whose edge is tokens [begin, end) of
// a path:
//   1. Its blocks are those whose last token is on its edge, one for each place in the path. A full block ends at a
//      multiple of block_tokens; a block that is not full is the last one of a leaf.
//   2. The first tokens of a block may be on edges above. The tokens of an inner edge after its last full block are in
//      the first block of each child.
//   3. Every token of the tree is in a block of the tree. A token or an edge that no block needs is removed.
// Therefore evict(block) removes everything from that block's first token on from the path, and each node that then
// holds nothing. The pool evicts the tail of the sequence that ended longest ago first, so a leaf's last block goes
// before the blocks that it continues. SGLang's evict() takes a whole leaf; this one takes as many of its blocks as are
// wanted.
//
// A look-up costs one binary search for each edge on the path, and a memcmp of its tokens.
//
// Left out: when an edge's sibling is evicted, the edge is not merged with its parent. SGLang does not merge either.
#pragma once

#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/prefix/prefix_cache.h"

namespace xpyd::allocator {

class RadixTree final : public PrefixCache {
 public:
  static constexpr int kAtOnce = 4096;  // tokens compared in one locked section: about a microsecond

  // A node's `parent` is edge << 32 | place among the edge's blocks. The tree calls lost(block), under the owner's
  // lock, when it drops a block by itself: what the block continued was evicted, or a longer block has all its tokens.
  RadixTree(int n_blocks, int block_tokens, Node* nodes, size_t node_stride, std::function<void(int32_t)> lost);

  int match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
            const Found& found) const override;
  void insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
              const Locked& locked) override;
  void evict(int32_t block) override;
  int tokens_in(int32_t block) const override;
  void check_invariants() const override;

  // Called without the lock, by tests and benches.
  int64_t size() const { return tokens_; }  // tokens on all edges
  int n_edges() const { return int(edges_.size() - unused_.size()); }

 private:
  struct Edge {
    std::vector<int32_t> tokens;                        // [begin, end) of the path
    std::vector<int32_t> blocks;                        // by place; the first is the block with token `begin`
    std::vector<std::pair<int32_t, int32_t>> children;  // {first token, edge}, sorted by token
    uint64_t salt = 0;                                  // of a root; a root's edge is empty
    int32_t parent = -1;                                // -1: a root, or not in use
    int begin = 0;
    int end() const { return begin + int(tokens.size()); }
  };
  struct Place {  // a point after token `depth` of a path; edge -1: not in the tree
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
