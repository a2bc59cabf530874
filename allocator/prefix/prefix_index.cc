#include "allocator/prefix/prefix_index.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <string>
#include <unordered_map>

#include "base/status.h"

namespace xpyd::allocator {
namespace {

static_assert(std::endian::native == std::endian::little, "hashes are defined on little-endian words");

size_t table_slots(int n_blocks) { return std::bit_ceil(2 * size_t(n_blocks)); }

uint64_t local_hash(const int32_t* tokens, int block_tokens) {
  // A constant length lets the compiler drop XXH3's dispatch on it; 16 is the default block.
  if (block_tokens == 16) return XXH3_64bits(tokens, 64);
  return XXH3_64bits(tokens, sizeof(int32_t) * size_t(block_tokens));
}

uint64_t chained_hash(uint64_t before, uint64_t local) {
  uint64_t pair[2] = {before, local};
  return XXH3_64bits(pair, sizeof pair);
}

// The first block without a salt stands under its local hash (the RFC's seq[0]).
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

PrefixIndex::PrefixIndex(int n_blocks, int block_tokens, uint64_t hash_mask, int proof_tokens, Node* nodes,
                         size_t node_stride)
    : BlockIndex(block_tokens),
      n_blocks_(n_blocks),
      block_tokens_(block_tokens),
      proof_tokens_(std::min(proof_tokens, block_tokens)),
      hash_mask_(hash_mask),
      slot_mask_(table_slots(n_blocks) - 1),
      nodes_(reinterpret_cast<std::byte*>(nodes)),
      node_stride_(node_stride),
      table_(table_slots(n_blocks) * sizeof(Entry)),
      keys_(size_t(n_blocks) * sizeof(uint64_t)),
      tokens_(size_t(n_blocks) * size_t(proof_tokens_) * sizeof(int32_t)) {}

size_t PrefixIndex::metadata_bytes(int n_blocks, int block_tokens) {
  return table_slots(n_blocks) * sizeof(Entry) +
         size_t(n_blocks) * (sizeof(uint64_t) + size_t(block_tokens) * sizeof(int32_t));
}

void PrefixIndex::hash_batch(uint64_t before, bool first, const int32_t* tokens, int n, uint64_t* hashes) const {
  // One loop: the chain is latency, and the local hashes of the next blocks, which do not depend on it, fill its gaps.
  for (int i = 0; i < n; ++i, tokens += block_tokens_, first = false) {
    before = sequence_hash(before, first, local_hash(tokens, block_tokens_));
    hashes[i] = before;
    __builtin_prefetch(&table()[home(key(before))]);
  }
}

int PrefixIndex::walk(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
                      const Found& found) const {
  // Software pipeline: while the blocks of one batch are fetched, the next batch is hashed.
  const int max_blocks = max_tokens / block_tokens_;
  const size_t stride = size_t(block_tokens_);
  uint64_t hashes[2][kBatch];
  int32_t blocks[kBatch];
  int n = std::min(kFirst, max_blocks), done = 0, first = 0, matched = 0, turn = 0;
  if (n <= 0) return 0;
  const auto look = [&] { first = candidates(hashes[turn], n, blocks); };
  const auto prove = [&] {
    matched = match(chain, tokens.data() + size_t(done) * stride, first, hashes[turn], blocks);
    found(std::span<const int32_t>(blocks, size_t(matched)));
  };
  hash_batch(chain.hash, true, tokens.data(), n, hashes[0]);
  for (; n > 0; turn ^= 1) {
    locked(std::ref(look));
    const int n_next = first < n ? 0 : std::min(kBatch, max_blocks - done - n);
    if (n_next > 0)
      hash_batch(hashes[turn][n - 1], false, tokens.data() + size_t(done + n) * stride, n_next, hashes[turn ^ 1]);
    locked(std::ref(prove));
    done += matched;
    if (matched < n) break;
    n = n_next;
  }
  return done * block_tokens_;
}

void PrefixIndex::add(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
                      const Locked& locked) {
  uint64_t hashes[kBatch];
  const size_t full = tokens.size() / size_t(block_tokens_);
  for (size_t done = 0; done < full && !chain.broken;) {
    const int32_t* next = tokens.data() + done * size_t(block_tokens_);
    const int n = int(std::min<size_t>(kBatch, full - done));
    hash_batch(chain.hash, chain.first(), next, n, hashes);
    const auto add_all = [&] {
      for (int i = 0; i < n && !chain.broken; ++i, next += block_tokens_)
        add_one(chain, hashes[i], next, blocks[done + size_t(i)]);
    };
    locked(std::ref(add_all));
    done += size_t(n);
  }
}

bool PrefixIndex::is_after(int32_t block, const PrefixChain& chain) const {
  const Node& of = node(block);
  uint64_t parent = chain.first() ? chain.hash : chain.uid;
  return (of.uid & 1) == uint64_t(chain.first()) && of.parent == parent;
}

bool PrefixIndex::same_tokens(int32_t block, const int32_t* tokens) const {
  const int32_t* mine = tokens_of(block);
  if (proof_tokens_ % 2) return std::memcmp(mine, tokens, sizeof(int32_t) * size_t(proof_tokens_)) == 0;
  uint64_t differ = 0;  // without branches, two tokens at a time: cheaper than a call for 64 bytes
  for (int t = 0; t < proof_tokens_; t += 2) {
    uint64_t a, b;
    std::memcpy(&a, mine + t, sizeof a);
    std::memcpy(&b, tokens + t, sizeof b);
    differ |= a ^ b;
  }
  return differ == 0;
}

int32_t PrefixIndex::slot_block(uint64_t hash) const {
  const uint32_t wanted = tag(key(hash));
  for (size_t s = home(wanted);; s = (s + 1) & slot_mask_) {
    const Entry& entry = table()[s];
    if (entry.block_plus_1 == 0) return -1;
    if (entry.tag == wanted) return entry.block_plus_1 - 1;
  }
}

bool PrefixIndex::has(uint64_t wanted) const {
  for (size_t s = home(wanted);; s = (s + 1) & slot_mask_) {
    const Entry& entry = table()[s];
    if (entry.block_plus_1 == 0) return false;
    if (entry.tag == tag(wanted) && keys_.as<uint64_t>()[entry.block_plus_1 - 1] == wanted) return true;
  }
}

int32_t PrefixIndex::find(const PrefixChain& chain, uint64_t hash, const int32_t* tokens) const {
  const uint32_t wanted = tag(key(hash));
  for (size_t s = home(wanted);; s = (s + 1) & slot_mask_) {
    const Entry& entry = table()[s];
    if (entry.block_plus_1 == 0) return -1;
    int32_t block = entry.block_plus_1 - 1;
    if (entry.tag == wanted && is_after(block, chain) && same_tokens(block, tokens)) return block;
  }
}

int PrefixIndex::candidates(const uint64_t* hashes, int n, int32_t* blocks) const {
  for (int i = 0; i < n; ++i) {
    int32_t block = slot_block(hashes[i]);
    if (block < 0) return i;
    blocks[i] = block;
    __builtin_prefetch(&node(block));
    __builtin_prefetch(tokens_of(block));
  }
  return n;
}

int PrefixIndex::match(PrefixChain& chain, const int32_t* tokens, int n, const uint64_t* hashes,
                       int32_t* blocks) const {
  for (int i = 0; i < n; ++i, tokens += block_tokens_) {
    int32_t block = blocks[i];
    if (!is_after(block, chain) || !same_tokens(block, tokens)) [[unlikely]] {
      block = find(chain, hashes[i], tokens);  // another stands first under this key, or it has gone
      if (block < 0) return i;
      blocks[i] = block;
    }
    advance(chain, hashes[i], block);
  }
  return n;
}

void PrefixIndex::insert(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block) {
  XPYD_CHECK(!contains(block), "block " + std::to_string(block));
  if (!listeners_.empty() && !has(key(hash))) {
    const std::optional<uint64_t> parent = chain.first() ? std::nullopt : std::optional(chain.hash);
    for (const auto& listener : listeners_)
      listener->stored(Tier::device, hash, parent, {tokens, size_t(block_tokens_)});
  }
  uint64_t k = key(hash);
  size_t s = home(k);
  while (table()[s].block_plus_1 != 0) s = (s + 1) & slot_mask_;
  table()[s] = {tag(k), block + 1};
  node(block) = {next_uid_++ << 1 | uint64_t(chain.first()), chain.first() ? chain.hash : chain.uid};
  keys_.as<uint64_t>()[block] = k;
  std::memcpy(tokens_.as<int32_t>() + size_t(block) * size_t(proof_tokens_), tokens,
              sizeof(int32_t) * size_t(proof_tokens_));
  ++size_;
}

void PrefixIndex::add_one(PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block) {
  chain.broken = !intact(chain);
  if (chain.broken) return;
  int32_t indexed = find(chain, hash, tokens);
  if (indexed < 0) {
    // Only an adopted block is indexed already, and under a lost parent if find() missed it.
    contains(block) ? reattach(chain, hash, tokens, block) : insert(chain, hash, tokens, block);
    indexed = block;
  }
  advance(chain, hash, indexed);
}

void PrefixIndex::reattach(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block) {
  XPYD_CHECK(contains(block) && keys_.as<uint64_t>()[block] == key(hash) && same_tokens(block, tokens),
             "block " + std::to_string(block) + " holds other tokens");
  XPYD_CHECK(!chain.first() && !(node(block).uid & 1), "a first block has no parent to lose");
  node(block).parent = chain.uid;
}

void PrefixIndex::erase(int32_t block) {
  XPYD_CHECK(contains(block), "block " + std::to_string(block));
  const uint64_t gone = keys_.as<uint64_t>()[block];
  size_t hole = home(gone);
  while (table()[hole].block_plus_1 != block + 1) hole = (hole + 1) & slot_mask_;
  // Shift back whatever would no longer be reached across the hole.
  for (size_t s = (hole + 1) & slot_mask_; table()[s].block_plus_1 != 0; s = (s + 1) & slot_mask_) {
    size_t from_home = (s - home(table()[s].tag)) & slot_mask_;
    if (from_home < ((s - hole) & slot_mask_)) continue;
    table()[hole] = table()[s];
    hole = s;
  }
  table()[hole].block_plus_1 = 0;
  node(block) = {};
  --size_;
  if (!listeners_.empty() && !has(gone))  // else another block has it
    for (const auto& listener : listeners_) listener->removed(Tier::device, gone);
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
    XPYD_CHECK(entry.tag == tag(keys_.as<uint64_t>()[block]));
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
  // A masked key does not give the parent's hash.
  if (hash_mask_ != ~uint64_t{0} || proof_tokens_ < block_tokens_) return;
  for (int32_t block = 0; block < n_blocks_; ++block) {
    if (!contains(block)) continue;
    const Node& of = node(block);
    PrefixChain chain;
    if (of.uid & 1) {
      chain.hash = of.parent;
    } else {
      auto parent = by_uid.find(of.parent);
      if (parent == by_uid.end()) continue;  // evicted before its child: unreachable, ages out
      advance(chain, keys_.as<uint64_t>()[parent->second], parent->second);
    }
    XPYD_CHECK(keys_.as<uint64_t>()[block] ==
               sequence_hash(chain.hash, chain.first(), local_hash(tokens_of(block), block_tokens_)));
  }
}

}  // namespace xpyd::allocator
