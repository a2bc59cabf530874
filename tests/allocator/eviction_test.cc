// Policies of the tiers with a state, by hand and beside a plain model of the published algorithm; marks; watermarks.
#include "allocator/eviction.h"

#include <list>
#include <unordered_map>

#include "allocator/kv_tiers.h"
#include "allocator/prefix_index.h"
#include "base/clock.h"
#include "base/random.h"
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

TEST_CASE("eviction: fifo and sieve, by hand", "[tiers][eviction]") {
  // A hit does not help. 0 1 2 | 0 is found | 3 for 0, 4 for 1 | 3 is found | 5 for 2, 6 for 3.
  CHECK(gone("fifo", 3, {0, 1, 2, 0, 3, 4, 3, 5, 6}) == std::vector{0, 1, 2, 3});
  // The hand spares 0, which was found, and takes 1; 2 was not; it spares 3 and takes 4, the newest; then it begins
  // anew at 0, which has not been found since.
  CHECK(gone("sieve", 3, {0, 1, 2, 0, 3, 4, 3, 5, 6}) == std::vector{1, 2, 4, 0});
  // lru, for comparison: 4 is older than 3 by its hit.
  CHECK(gone("lru", 3, {0, 1, 2, 0, 3, 4, 3, 5, 6}) == std::vector{1, 2, 0, 4});
  // All are visited: the hand goes round once, and the oldest goes.
  CHECK(gone("sieve", 3, {0, 1, 2, 2, 1, 0, 3, 4}) == std::vector{0, 1});
}

// SIEVE as its paper has it: a queue, a bit, a hand that goes from the tail to the head.
class Sieve {
 public:
  explicit Sieve(size_t capacity) : capacity_(capacity) {}
  bool get(int key) {
    if (const auto at = where_.find(key); at != where_.end()) return at->second->visited = true;
    if (queue_.size() == capacity_) evict();
    queue_.push_front({key, false});
    where_[key] = queue_.begin();
    return false;
  }

 private:
  struct Node {
    int key;
    bool visited;
  };
  void evict() {
    if (hand_ == queue_.end()) hand_ = std::prev(queue_.end());
    while (hand_->visited) {
      hand_->visited = false;
      hand_ = hand_ == queue_.begin() ? std::prev(queue_.end()) : std::prev(hand_);
    }
    const auto victim = hand_;
    hand_ = hand_ == queue_.begin() ? queue_.end() : std::prev(hand_);
    where_.erase(victim->key);
    queue_.erase(victim);
  }
  const size_t capacity_;
  std::list<Node> queue_;
  std::list<Node>::iterator hand_ = queue_.end();
  std::unordered_map<int, std::list<Node>::iterator> where_;
};

TEST_CASE("eviction: sieve hits and misses as the published algorithm, operation by operation", "[tiers][eviction]") {
  for (const int capacity : {1, 2, 7, 50}) {
    INFO(capacity);
    KeyCache cache("sieve", capacity);
    Sieve model{size_t(capacity)};
    Random random{uint64_t(capacity)};
    int misses = 0;
    for (int i = 0; i < 10000; ++i) {
      const double skew = random.uniform();  // few keys often, many now and then
      const int key = int(200 * skew * skew * skew);
      const bool hit = cache.get(key);
      REQUIRE(hit == model.get(key));
      misses += !hit;
    }
    CHECK(misses > 1000);
    CHECK(misses < 9900);
    cache.tiers().check_invariants();
  }
}

TEST_CASE("eviction: what is pinned goes last under every policy; a pause and a thought count where a policy says so",
          "[tiers][eviction]") {
  for (const EvictionPolicy& policy : kEvictionPolicies) {
    INFO(policy.name);
    KeyCache cache(policy.name, 4);
    for (int key : {10, 20, 30, 40}) cache.get(key);
    cache.tiers().mark(KeyCache::tokens(10), 0, 0, KvMark::pinned, true);
    for (int key = 50; key < 120; key += 10) cache.get(key);
    CHECK(cache.has(10));
    cache.tiers().mark(KeyCache::tokens(10), 0, 0, KvMark::pinned, false);
    for (int key = 150; key < 220; key += 10) cache.get(key);
    // lfu and length_aware keep what is as rarely used by its age, too.
    CHECK(!cache.has(10));
    cache.tiers().check_invariants();
  }
  for (const char* policy : {"lru", "ttl", "no_reasoning"}) {
    INFO(policy);
    KeyCache cache(policy, 4);
    for (int key : {10, 20, 30, 40}) cache.get(key);
    cache.tiers().mark(KeyCache::tokens(10), 0, 0, KvMark::awaited, true);
    cache.tiers().mark(KeyCache::tokens(40), 0, 0, KvMark::thought, true);
    cache.get(50);
    CHECK(cache.has(10) == (policy != std::string("lru")));
    CHECK(cache.has(20) == (policy != std::string("ttl")));
    CHECK(cache.has(40) == (policy != std::string("no_reasoning")));
  }
}

TEST_CASE(
    "eviction: from the high watermark the host gives up what the disk has, down to the low one, and nothing else",
    "[tiers][eviction]") {
  TempDir dir;
  const int capacity = 100;
  const auto run = [&](double high, double low, int n_pinned) {
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
      if (key < n_pinned) tiers->mark(own, 0, 0, KvMark::pinned, true);
      do tiers->poll();
      while (tiers->moving());
      most = std::max(most, tiers->stats().host_blocks);
      tiers->check_invariants();
      if (n_pinned < 300 || key < capacity) CHECK(tiers->match(own, 0, 1) == 1);
    }
    for (int key = 0; n_pinned < 300 && key < 300; ++key) CHECK(tiers->match(KeyCache::tokens(10 * key), 0, 1) == 1);
    // While anything else can go, who is pinned stays where it is.
    const std::vector<uint64_t> held = tiers->held(Tier::host);
    for (int key = 0; n_pinned < 300 && key < n_pinned; ++key)
      CHECK(std::ranges::count(held, prefix_hash(0, true, KeyCache::tokens(10 * key).data(), kBlock)) == 1);
    return std::pair(most, tiers->stats());
  };
  const auto [most, stats] = run(0.9, 0.85, 0);
  CHECK(most == 89);
  CHECK(stats.host_blocks >= 85);
  CHECK(stats.host_relieved == 300 - stats.host_blocks);
  CHECK(stats.host_evictions == 0);
  CHECK(run(1, .85, 0).first == capacity);
  CHECK(run(0.9, 0.85, 40).second.host_relieved > 0);
  // What is pinned is not given up before its room is wanted.
  const auto [most_pinned, kept] = run(0.9, 0.85, 300);
  CHECK(most_pinned == capacity);
  CHECK(kept.host_relieved == 0);
}

}  // namespace
}  // namespace xpyd::testing::eviction_test
