#include "allocator/prefix/prefix_index.h"

#include <bit>
#include <cstring>
#include <string>

#include "base/status.h"

namespace xpyd::allocator {
namespace {

size_t table_slots(int n_blocks) { return std::bit_ceil(2 * size_t(n_blocks)); }

}  // namespace

PrefixIndex::PrefixIndex(int n_blocks, int block_tokens, uint64_t hash_mask, int proof_tokens, Node* nodes,
                         size_t node_stride)
    : PrefixCache(block_tokens, n_blocks, block_tokens, nodes, node_stride),
      proof_tokens_(std::min(proof_tokens, block_tokens)),
      hash_mask_(hash_mask),
      slot_mask_(table_slots(n_blocks) - 1),
      table_(table_slots(n_blocks) * sizeof(Entry)),
      keys_(size_t(n_blocks) * sizeof(uint64_t)),
      tokens_(size_t(n_blocks) * size_t(proof_tokens_) * sizeof(int32_t)) {}

size_t PrefixIndex::metadata_bytes(int n_blocks, int block_tokens) {
  return table_slots(n_blocks) * sizeof(Entry) +
         size_t(n_blocks) * (sizeof(uint64_t) + size_t(block_tokens) * sizeof(int32_t));
}

int PrefixIndex::match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
                       const Found& found) const {
  // A software pipeline: while the blocks of one batch are fetched, the next batch is hashed.
  const int max_blocks = max_tokens / block_tokens_;
  const size_t stride = size_t(block_tokens_);
  uint64_t hashes[2][kBatch];
  int32_t blocks[kBatch];
  int n = std::min(kFirst, max_blocks), done = 0, first = 0, matched = 0, turn = 0;
  if (n <= 0) return 0;
  const auto look = [&] { first = candidates(hashes[turn], n, blocks); };
  const auto take = [&] {
    matched = prove(chain, tokens.data() + size_t(done) * stride, first, hashes[turn], blocks);
    found(std::span<const int32_t>(blocks, size_t(matched)));
  };
  hash_batch(chain.hash, true, tokens.data(), n, hashes[0]);
  for (; n > 0; turn ^= 1) {
    locked(std::ref(look));
    const int n_next = first < n ? 0 : std::min(kBatch, max_blocks - done - n);
    if (n_next > 0)
      hash_batch(hashes[turn][n - 1], false, tokens.data() + size_t(done + n) * stride, n_next, hashes[turn ^ 1]);
    locked(std::ref(take));
    done += matched;
    if (matched < n) break;
    n = n_next;
  }
  return done * block_tokens_;
}

void PrefixIndex::insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
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
  uint64_t differ = 0;  // branch-free, two tokens at a time: cheaper than a call for 64 bytes
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

int32_t PrefixIndex::find_key(uint64_t hash) const {
  const uint64_t wanted = key(hash);
  for (size_t s = home(wanted);; s = (s + 1) & slot_mask_) {
    const Entry& entry = table()[s];
    if (entry.block_plus_1 == 0) return -1;
    if (entry.tag == tag(wanted) && key_of(entry.block_plus_1 - 1) == wanted) return entry.block_plus_1 - 1;
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

int PrefixIndex::prove(PrefixChain& chain, const int32_t* tokens, int n, const uint64_t* hashes,
                       int32_t* blocks) const {
  for (int i = 0; i < n; ++i, tokens += block_tokens_) {
    int32_t block = blocks[i];
    if (!is_after(block, chain) || !same_tokens(block, tokens)) [[unlikely]] {
      block = find(chain, hashes[i], tokens);  // another block comes first under this key, or this one was evicted
      if (block < 0) return i;
      blocks[i] = block;
    }
    advance(chain, hashes[i], block);
  }
  return n;
}

void PrefixIndex::insert(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block) {
  XPYD_CHECK(!contains(block), "block " + std::to_string(block));
  if (!listeners_.empty() && find_key(hash) < 0) {
    const std::optional<uint64_t> parent = chain.first() ? std::nullopt : std::optional(chain.hash);
    for (const auto& listener : listeners_)
      listener->stored(Tier::device, hash, parent, {tokens, size_t(block_tokens_)});
  }
  uint64_t k = key(hash);
  size_t s = home(k);
  while (table()[s].block_plus_1 != 0) s = (s + 1) & slot_mask_;
  table()[s] = {tag(k), block + 1};
  node(block) = {next_uid_++ << 1 | uint64_t(chain.first()), chain.first() ? chain.hash : chain.uid};
  key_of(block) = k;
  std::memcpy(tokens_.as<int32_t>() + size_t(block) * size_t(proof_tokens_), tokens,
              sizeof(int32_t) * size_t(proof_tokens_));
  ++size_;
}

void PrefixIndex::add_one(PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block) {
  chain.broken = !intact(chain);
  if (chain.broken) return;
  int32_t indexed = find(chain, hash, tokens);
  if (indexed < 0) {
    // Only an adopted block can be indexed already. If find() missed it, its parent was evicted.
    contains(block) ? reattach(chain, hash, tokens, block) : insert(chain, hash, tokens, block);
    indexed = block;
  }
  advance(chain, hash, indexed);
}

void PrefixIndex::reattach(const PrefixChain& chain, uint64_t hash, const int32_t* tokens, int32_t block) {
  XPYD_CHECK(contains(block) && key_of(block) == key(hash) && same_tokens(block, tokens),
             "block " + std::to_string(block) + " holds other tokens");
  XPYD_CHECK(!chain.first() && !(node(block).uid & 1), "a first block has no parent to lose");
  node(block).parent = chain.uid;
}

void PrefixIndex::evict(int32_t block) {
  XPYD_CHECK(contains(block), "block " + std::to_string(block));
  const uint64_t gone = key_of(block);
  size_t hole = home(gone);
  while (table()[hole].block_plus_1 != block + 1) hole = (hole + 1) & slot_mask_;
  // Shift back every entry that could no longer be reached across the hole.
  for (size_t s = (hole + 1) & slot_mask_; table()[s].block_plus_1 != 0; s = (s + 1) & slot_mask_) {
    size_t from_home = (s - home(table()[s].tag)) & slot_mask_;
    if (from_home < ((s - hole) & slot_mask_)) continue;
    table()[hole] = table()[s];
    hole = s;
  }
  table()[hole].block_plus_1 = 0;
  node(block) = {};
  --size_;
  if (!listeners_.empty() && find_key(gone) < 0)  // otherwise another block has this hash
    for (const auto& listener : listeners_) listener->removed(Tier::device, gone);
}

}  // namespace xpyd::allocator
