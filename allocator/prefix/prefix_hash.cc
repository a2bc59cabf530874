#include "allocator/prefix/prefix_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <string>
#include <unordered_map>

#include "allocator/prefix/prefix_index.h"
#include "base/status.h"

namespace xpyd::allocator {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes are defined on little-endian words");

uint64_t local_hash(const int32_t* tokens, int block_tokens) {
  // A constant length lets the compiler drop XXH3's dispatch on it; 16 is the default block.
  if (block_tokens == 16) return XXH3_64bits(tokens, 64);
  return XXH3_64bits(tokens, sizeof(int32_t) * size_t(block_tokens));
}

uint64_t chained_hash(uint64_t before, uint64_t local) {
  uint64_t pair[2] = {before, local};
  return XXH3_64bits(pair, sizeof pair);
}

// Without a salt, the key of the first block is its local hash (the RFC's seq[0]).
uint64_t sequence_hash(uint64_t before, bool first, uint64_t local) {
  return first && before == 0 ? local : chained_hash(before, local);
}

}  // namespace

uint64_t prefix_hash(uint64_t before, bool first, const int32_t* tokens, int block_tokens) {
  return sequence_hash(before, first, local_hash(tokens, block_tokens));
}

std::vector<uint64_t> prefix_hashes(std::span<const int32_t> tokens, int block_tokens, uint64_t salt) {
  std::vector<uint64_t> hashes(tokens.size() / size_t(block_tokens));
  uint64_t before = salt;
  for (size_t i = 0; i < hashes.size(); ++i)
    hashes[i] = before = prefix_hash(before, i == 0, tokens.data() + i * size_t(block_tokens), block_tokens);
  return hashes;
}

// The parts of PrefixIndex that compute keys, and that recount whether they are right.

void PrefixIndex::hash_batch(uint64_t before, bool first, const int32_t* tokens, int n, uint64_t* hashes) const {
  // The chain of hashes is bound by latency. In one loop, the local hashes of the next blocks, which do not depend on
  // it, fill the gaps.
  for (int i = 0; i < n; ++i, tokens += block_tokens_, first = false) {
    before = sequence_hash(before, first, local_hash(tokens, block_tokens_));
    hashes[i] = before;
    __builtin_prefetch(&table()[home(key(before))]);
  }
}

void PrefixIndex::check_invariants() const {
  std::vector<int> seen(size_t(n_blocks_), 0);
  std::unordered_map<uint64_t, int32_t> by_uid;
  int entries = 0, indexed = 0;
  for (size_t s = 0; s <= slot_mask_; ++s) {
    const Entry& entry = table()[s];
    if (entry.block_plus_1 == 0) continue;
    int32_t block = entry.block_plus_1 - 1;
    XPYD_CHECK(block < n_blocks_ && contains(block) && ++seen[size_t(block)] == 1);
    XPYD_CHECK(entry.tag == tag(key_of(block)));
    for (size_t at = home(entry.tag); at != s; at = (at + 1) & slot_mask_)
      XPYD_CHECK(table()[at].block_plus_1 != 0, "entry cut off from its home slot");
    ++entries;
  }
  for (int32_t block = 0; block < n_blocks_; ++block) {
    if (!contains(block)) continue;
    ++indexed;
    XPYD_CHECK(by_uid.emplace(node(block).uid, block).second, "uid given twice");
  }
  XPYD_CHECK(entries == size_ && indexed == size_);
  // A masked key does not give its parent's hash.
  if (hash_mask_ != ~uint64_t{0} || proof_tokens_ < block_tokens_) return;
  for (int32_t block = 0; block < n_blocks_; ++block) {
    if (!contains(block)) continue;
    const Node& of = node(block);
    PrefixChain chain;
    if (of.uid & 1) {
      chain.hash = of.parent;
    } else {
      auto parent = by_uid.find(of.parent);
      if (parent == by_uid.end()) continue;  // the parent was evicted first: unreachable, and it ages out
      advance(chain, key_of(parent->second), parent->second);
    }
    XPYD_CHECK(key_of(block) == sequence_hash(chain.hash, chain.first(), local_hash(tokens_of(block), block_tokens_)));
  }
}

}  // namespace xpyd::allocator
