// Policies of the tiers by hand; watermarks.
#include "allocator/eviction.h"

#include <algorithm>
#include <array>
#include <vector>

#include "allocator/kv_tiers.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::eviction_test {
namespace {

constexpr int kBlock = 4;  // tokens
constexpr size_t kBlockBytes = kBlock * kTinyShape.token_bytes();

// A host tier as a cache of keys: each a sequence of one block.
class KeyCache {
 public:
  KeyCache(const char* policy, int capacity) {
    options_.host_bytes = size_t(capacity) * kBlockBytes;
    options_.block_tokens = kBlock;
    options_.host_eviction = policy;
    tiers_ = KvTiers::create(kTinyShape, options_, cpu_device(), {}).value();
  }
  static std::array<int32_t, kBlock> tokens(int key) { return {key, key + 1, 7, 7}; }
  bool has(int key) const { return tiers_->match(tokens(key), 0, 1) == 1; }
  bool get(int key) {  // true: a hit; else it is there now
    tiers_->tick();
    const auto own = tokens(key);
    KvTiers::Chain chain = KvTiers::root(0);
    if (tiers_->find(chain, own.data()) >= 0) return true;
    const int32_t block = tiers_->add(chain, own.data());
    REQUIRE(block >= 0);
    tiers_->stored(block);
    return false;
  }
  KvTiers& tiers() { return *tiers_; }

 private:
  KvTierOptions options_;
  std::unique_ptr<KvTiers> tiers_;
};

// Which keys of 0 to 9 went, in order, while these were asked for.
std::vector<int> gone(const char* policy, int capacity, const std::vector<int>& keys) {
  KeyCache cache(policy, capacity);
  std::vector<int> order, here;
  for (int key : keys) {
    if (!cache.get(key)) here.push_back(key);
    for (int k : std::vector<int>(here))
      if (!cache.has(k)) order.push_back(k), std::erase(here, k);
    cache.tiers().check_invariants();
  }
  return order;
}

TEST_CASE("eviction: fifo, by hand", "[tiers][eviction]") {
  // A hit does not help. 0 1 2 | 0 is found | 3 for 0, 4 for 1 | 3 is found | 5 for 2, 6 for 3.
  CHECK(gone("fifo", 3, {0, 1, 2, 0, 3, 4, 3, 5, 6}) == std::vector{0, 1, 2, 3});
  // lru, for comparison: 4 is older than 3 by its hit.
  CHECK(gone("lru", 3, {0, 1, 2, 0, 3, 4, 3, 5, 6}) == std::vector{1, 2, 0, 4});
}

TEST_CASE(
    "eviction: from the high watermark the host gives up what the disk has, down to the low one, and nothing else",
    "[tiers][eviction]") {
  TempDir dir;
  const int capacity = 100;
  const auto run = [&](double high, double low) {
    KvTierOptions o;
    o.host_bytes = capacity * kBlockBytes;
    o.block_tokens = kBlock;
    o.disk_dir = dir.path;
    o.disk_bytes = 400 * DiskFile::kSector;
    o.high_watermark = high, o.low_watermark = low;
    auto tiers = KvTiers::create(kTinyShape, o, cpu_device(), {}).value();
    int64_t most = 0;
    for (int key = 0; key < 300; ++key) {
      tiers->tick();
      const auto own = KeyCache::tokens(10 * key);
      KvTiers::Chain chain = KvTiers::root(0);
      for (int32_t block; (block = tiers->add(chain, own.data())) != -2;) {
        if (block >= 0) {
          tiers->stored(block);
          break;
        }
        tiers->poll();
      }
      do tiers->poll();
      while (tiers->moving());
      most = std::max(most, tiers->stats().host_blocks);
      tiers->check_invariants();
      CHECK(tiers->match(own, 0, 1) == 1);
    }
    for (int key = 0; key < 300; ++key) CHECK(tiers->match(KeyCache::tokens(10 * key), 0, 1) == 1);
    return std::pair(most, tiers->stats());
  };
  const auto [most, stats] = run(0.9, 0.85);
  CHECK(most == 89);
  CHECK(stats.host_blocks >= 85);
  CHECK(stats.host_relieved == 300 - stats.host_blocks);
  CHECK(stats.host_evictions == 0);
  CHECK(run(1, .85).first == capacity);
}

}  // namespace
}  // namespace xpyd::testing::eviction_test
