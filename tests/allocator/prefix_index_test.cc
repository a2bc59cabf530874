#include "allocator/prefix/prefix_index.h"

// XXH_NO_INLINE_HINTS: at -Og g++ 14 cannot inline everything that xxhash 0.8.3 marks as always inline.
#define XXH_NO_INLINE_HINTS 1
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <map>
#include <vector>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::prefix_index_test {

struct TestIndex : std::vector<PrefixIndex::Node>, PrefixIndex {
  TestIndex(int n_blocks, int block_tokens, uint64_t hash_mask)
      : std::vector<Node>(size_t(n_blocks)),
        PrefixIndex(n_blocks, block_tokens, hash_mask, block_tokens, data(), sizeof(Node)) {}
  using PrefixIndex::insert, PrefixIndex::evict, PrefixIndex::size;
};

uint64_t seq_hash(const PrefixIndex& index, const PrefixChain& chain, const int32_t* tokens) {
  uint64_t hash;
  index.hash_batch(chain.hash, chain.first(), tokens, 1, &hash);
  return hash;
}

TEST_CASE("PrefixIndex: the chained hash follows its published definition", "[allocator]") {
  std::vector<int32_t> tokens;
  for (int i = 0; i < 48; ++i) tokens.push_back(1000 + 7 * i);
  TestIndex index(4, 16, ~uint64_t{0});
  uint64_t seq[3];
  index.hash_batch(0, true, tokens.data(), 3, seq);
  CHECK(seq[0] == XXH3_64bits(tokens.data(), 64));
  for (int i = 1; i < 3; ++i) {
    uint64_t pair[2] = {seq[i - 1], XXH3_64bits(tokens.data() + 16 * i, 64)};
    CHECK(seq[i] == XXH3_64bits(pair, 16));
  }
  // The same holds with a salt, and in two batches.
  uint64_t salted[3], later[2];
  index.hash_batch(99, true, tokens.data(), 3, salted);
  uint64_t pair[2] = {99, seq[0]};
  CHECK(salted[0] == XXH3_64bits(pair, 16));
  CHECK(salted[1] != seq[1]);
  PrefixChain chain;
  index.insert(chain, seq[0], tokens.data(), 2);
  index.advance(chain, seq[0], 2);
  index.hash_batch(chain.hash, chain.first(), tokens.data() + 16, 2, later);
  CHECK((later[0] == seq[1] && later[1] == seq[2]));
}

TEST_CASE("PrefixIndex: random inserts and erases agree with a map", "[allocator]") {
  // Blocks of one token are chained in trees of depth <= 3 under few keys, which gives long clusters and wrap-around.
  for (uint64_t mask : {~uint64_t{0}, uint64_t{0xff}, uint64_t{1}}) {
    constexpr int kBlocks = 37;
    TestIndex index(kBlocks, 1, mask);
    Random random(mask);
    std::map<std::vector<int32_t>, int32_t> model;  // {salt, tokens...} -> block
    std::vector<std::vector<int32_t>> path_of(kBlocks);
    int hits = 0;
    for (int i = 0; i < 30'000; ++i) {
      std::vector<int32_t> path{int32_t(random.below(2))};
      PrefixChain chain{.hash = uint64_t(path[0]) * 5};
      size_t depth = 1 + random.below(3);
      for (size_t d = 0; d < depth; ++d) {
        int32_t token = int32_t(random.below(4));
        path.push_back(token);
        uint64_t hash = seq_hash(index, chain, &token);
        int32_t found = index.find(chain, hash, &token);
        auto expected = model.find(path);
        REQUIRE(found == (expected == model.end() ? -1 : expected->second));
        if (found < 0 && index.size() < kBlocks) {
          int32_t block = 0;
          while (index.contains(block)) ++block;
          index.insert(chain, hash, &token, block);
          path_of[size_t(block)] = path;
          model[path] = found = block;
        }
        if (found < 0) break;
        hits += expected != model.end();
        index.advance(chain, hash, found);
      }
      if (random.below(3) == 0) {  // erase a leaf: a child without its parent must not be found
        int32_t block = int32_t(random.below(kBlocks));
        bool leaf = index.contains(block);
        for (auto& [other, b] : model)
          leaf = leaf && !(other.size() > path_of[size_t(block)].size() &&
                           std::equal(path_of[size_t(block)].begin(), path_of[size_t(block)].end(), other.begin()));
        if (leaf) index.evict(block), model.erase(path_of[size_t(block)]);
      }
      index.check_invariants();
    }
    REQUIRE(index.size() == int(model.size()));
    CHECK(hits > 10'000);
  }
}

TEST_CASE("PrefixIndex: a block whose parent returns as another block is found again only once it is attached",
          "[allocator]") {
  TestIndex index(8, 2, 0);  // every key collides
  int32_t a[2] = {1, 2}, c[2] = {5, 6};
  PrefixChain root, after_a;
  index.insert(root, 0, a, 0);
  index.advance(after_a, 0, 0);
  index.insert(after_a, 0, c, 2);
  CHECK(index.find(after_a, 0, c) == 2);
  // A salt that equals a block's identity number must not match that block.
  for (uint64_t salt = 0; salt < 64; ++salt) CHECK(index.find(PrefixChain{.hash = salt}, 0, c) == -1);
  index.evict(0);
  CHECK_FALSE(index.intact(after_a));
  index.insert(root, 0, a, 4);
  PrefixChain again;
  index.advance(again, 0, 4);
  CHECK(index.find(again, 0, c) == -1);
  index.reattach(again, 0, c, 2);
  CHECK(index.find(again, 0, c) == 2);
  index.check_invariants();
}

}  // namespace xpyd::testing::prefix_index_test
