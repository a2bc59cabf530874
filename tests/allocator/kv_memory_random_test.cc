// Random operations against a trivially correct model: what each sequence's tokens are, and which
// blocks are named by whom.
#include <algorithm>
#include <set>

#include "base/device.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_memory_random_test {

namespace {

struct Config {
  const char* scheme = "paged";
  int block_tokens = 4;
  int n_blocks = 24;
  bool prefix_cache = true;
  KvOrder order = KvOrder::layer_major;
  int memories = 1;
  uint64_t hash_mask = ~uint64_t{0};
  int operations = 20'000;
  bool radix = false;
};

class Trial {
 public:
  Trial(const Config& config, uint64_t seed) : config_(config), random_(seed) {
    paged_ = std::string(config.scheme) == "paged";
    KvOptions options = tiny_options(config.block_tokens, config.n_blocks, config.prefix_cache, config.order,
                                     paged_ ? 0 : config.block_tokens);
    pool_ = std::make_shared<BlockPool>(KvPlaces(plan_of(options), cpu_device().allocate(options.pool_bytes).value()),
                                        config.prefix_cache && paged_, std::make_unique<FreeList>(config.n_blocks),
                                        INT_MAX, config.hash_mask, INT_MAX, config.radix);
    pool_->poison_new_blocks(true);
    for (int m = 0; m < config.memories; ++m) memories_.push_back(find_kv_scheme(config.scheme)->make(pool_, options));
  }

  void run() {
    for (int i = 0; i < config_.operations; ++i) {
      step();
      check(i % 64 == 0);
    }
    // Everything can be given back.
    for (Flying& f : handovers_) memories_[0]->handoff().discard(f.handover);
    handovers_.clear();
    for (Lease& l : leases_) memories_[l.memory]->unpin(l.lease);
    leases_.clear();
    for (Live& s : live_) memories_[s.memory]->free(s.handle);
    live_.clear();
    check(true);
    memories_[0]->clear_prefix_cache();
    REQUIRE(memories_[0]->stats().free == config_.n_blocks);
    // The trial was not vacuous.
    if (paged_ && config_.prefix_cache) {
      CHECK(hits_ > 100);
      CHECK(evictions() > 100);
      CHECK(drawn_ > 10);
      if (config_.radix && config_.block_tokens > 1) CHECK(std::min({within_, taken_over_, cut_}) > 20);
    }
    if (paged_ && config_.block_tokens > 1) CHECK(copies_ > 50);
    CHECK(refused_ > 100);
  }

 private:
  struct Live {
    size_t memory;
    KvHandle handle;
    uint64_t salt;
    std::vector<int32_t> tokens;  // written
    std::vector<int32_t> prompt;  // to write still, from the front
  };
  struct Lease {
    size_t memory;
    KvLease lease;
    std::vector<int32_t> blocks;
  };
  struct Flying {
    KvHandover handover;
    uint64_t salt;
    std::vector<int32_t> tokens;
  };

  KvLayout plan_of(const KvOptions& o) const { return {o.shape, o.order, o.block_tokens, config_.n_blocks}; }

  KvMemory& of(const Live& s) { return *memories_[s.memory]; }
  int64_t evictions() const {
    int64_t sum = 0;
    for (auto& m : memories_) sum += m->stats().evictions;
    return sum;
  }
  int blocks_for(size_t tokens) const {
    return int((tokens + size_t(config_.block_tokens) - 1) / size_t(config_.block_tokens));
  }
  int users(int32_t block) const {
    int n = 0;
    for (const Live& s : live_) n += std::ranges::count(memories_[s.memory]->blocks(s.handle), block);
    for (const Flying& f : handovers_) n += std::ranges::count(f.handover.blocks, block);
    return n;
  }

  // Two letters and few lengths: prefixes are shared often and diverge often.
  std::vector<int32_t> draw_tokens() {
    size_t longest = paged_ ? size_t(config_.block_tokens) * 6 : size_t(config_.block_tokens);
    std::vector<int32_t> tokens(1 + random_.below(longest));
    int32_t letter = int32_t(random_.below(3));
    for (int32_t& t : tokens) t = random_.below(16) == 0 ? letter = int32_t(random_.below(3)) : letter;
    return tokens;
  }

  void step() {
    uint64_t what = random_.below(100);
    if (what < 18) return live_.size() < 8 ? reserve() : release(random_.below(live_.size()));
    if (what < 20 && what == 18) return memories_[random_.below(memories_.size())]->clear_prefix_cache();
    if (what < 26 && !handovers_.empty()) return land();
    if (what < 29 && !leases_.empty()) return unpin();
    if (live_.empty()) return;
    size_t i = random_.below(live_.size());
    if (what < 64) return grow(live_[i]);
    if (what < 74) return fork(i);
    if (what < 77) return pin(live_[i]);
    if (what >= 97) return escrow(live_[i]);
    if (what < 80) return hand_over(i);
    if (what < 92) return release(i);
    of(live_[i]).trim(live_[i].handle);
  }

  void reserve() {
    Live s{random_.below(memories_.size()), kNoKv, random_.below(2) * 77, {}, draw_tokens()};
    KvMemory& kv = of(s);
    int found = kv.probe(s.prompt, s.salt);
    int before = kv.stats().available();
    const int64_t copied_before = kv.stats().cow_copies;
    Result<KvReservation> r = kv.reserve(s.prompt, s.salt);
    if (!paged_) {
      REQUIRE(r.ok() == (before > 0));
      refused_ += !r.ok();
      if (!r.ok()) return;
    }
    REQUIRE(r.ok());
    int cached = r.value().cached_tokens;
    const int rows = cached % config_.block_tokens;
    const bool whole = rows == 0 && cached == found / config_.block_tokens * config_.block_tokens;
    // Of a tree's hit the rows of the last block are left out where there is no block to copy them to.
    REQUIRE((cached == found || (kv.stats().escrowed > 0 && cached < found) ||
             (config_.radix && whole && kv.stats().available() <= 1)));
    REQUIRE(kv.stats().available() >= 0);
    REQUIRE((rows == 0 || config_.radix));
    if (config_.radix) {
      const bool copied = kv.stats().cow_copies > copied_before;
      REQUIRE(copied <= (rows > 0));
      within_ += copied, taken_over_ += rows > 0 && !copied, cut_ += cached < found;
      if (rows > 0) REQUIRE(users(kv.blocks(r.value().handle).back()) == 0);  // of those before it
    }
    REQUIRE(cached < int(s.prompt.size()));
    if (!config_.prefix_cache || !paged_) REQUIRE(cached == 0);
    hits_ += cached > 0;
    s.handle = r.value().handle;
    s.tokens.assign(s.prompt.begin(), s.prompt.begin() + cached);
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + cached);
    live_.push_back(s);
  }

  void grow(Live& s) {
    KvMemory& kv = of(s);
    size_t n = 1 + random_.below(2 * size_t(config_.block_tokens));
    if (!s.prompt.empty()) n = std::min(n, s.prompt.size());
    if (!paged_) n = std::min(n, size_t(config_.block_tokens) - s.tokens.size());
    while (s.prompt.size() < n) s.prompt.push_back(int32_t(random_.below(3)));  // decode

    bool copy = paged_ && s.tokens.size() % size_t(config_.block_tokens) != 0 &&
                users(kv.blocks(s.handle)[s.tokens.size() / size_t(config_.block_tokens)]) > 1;
    REQUIRE(kv.tail_shared(s.handle) == copy);
    std::vector<int32_t> before(kv.blocks(s.handle).begin(), kv.blocks(s.handle).end());
    KvStats stats = kv.stats();
    int more = std::max(0, blocks_for(s.tokens.size() + n) - int(before.size())) + int(copy && n > 0);
    const int drawn = std::min(more, kv.escrowed(s.handle));
    bool fits = kv.append(s.handle, int(n));
    REQUIRE(fits == (!paged_ || more - drawn <= stats.available()));
    REQUIRE(stats.escrowed - kv.stats().escrowed == (fits ? drawn : 0));
    drawn_ += fits * drawn;
    if (!fits) {
      ++refused_;
      REQUIRE(std::ranges::equal(kv.blocks(s.handle), before));
      KvStats after = kv.stats();
      REQUIRE((after.free == stats.free && after.cached == stats.cached && after.evictions == stats.evictions));
      if (random_.below(2) == 0) release(random_.below(live_.size()));  // a preemption
      return;
    }
    copies_ += copy && n > 0;
    REQUIRE(kv.stats().evictions - stats.evictions == std::max(0, more - stats.free));
    if (random_.below(8) == 0) return;  // room taken and not used
    size_t done = s.tokens.size(), write = random_.below(4) == 0 ? 1 + random_.below(n) : n;
    write = std::min(write, n);
    s.tokens.insert(s.tokens.end(), s.prompt.begin(), s.prompt.begin() + ptrdiff_t(write));
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + ptrdiff_t(write));
    write_rows(kv.view(s.handle), s.tokens, s.salt, int(done));
    kv.written(s.handle, std::span<const int32_t>(s.tokens).subspan(done));
  }

  // A number: nothing moves, and all others have less.
  void escrow(Live& s) {
    if (!paged_) return;
    KvMemory& kv = of(s);
    const KvStats before = kv.stats();
    const int n = int(random_.below(4 * size_t(config_.block_tokens))), held = kv.escrowed(s.handle);
    const int need = std::max(0, blocks_for(s.tokens.size() + size_t(n)) - int(kv.blocks(s.handle).size())) +
                     int(n > 0 && kv.tail_shared(s.handle));
    const bool fits = kv.escrow(s.handle, n);
    REQUIRE(fits == (need <= held || need - held <= before.available()));
    const KvStats after = kv.stats();
    REQUIRE(kv.escrowed(s.handle) == (fits ? need : held));
    REQUIRE(before.available() - after.available() == (fits ? need - held : 0));
    REQUIRE((after.free == before.free && after.cached == before.cached && after.evictions == before.evictions));
  }

  void fork(size_t i) {
    int available = of(live_[i]).stats().available();
    Result<KvHandle> child = of(live_[i]).fork(live_[i].handle);
    REQUIRE(child.ok() == (paged_ || available > 0));
    if (!child.ok()) return;
    Live s = live_[i];
    s.handle = child.value();
    live_.push_back(s);
  }

  void release(size_t i) {
    of(live_[i]).free(live_[i].handle);
    live_.erase(live_.begin() + ptrdiff_t(i));
  }

  void pin(Live& s) {
    if (leases_.size() >= 3) return unpin();
    std::span<const int32_t> blocks = of(s).blocks(s.handle);
    if (random_.below(2) == 0 || blocks.empty()) {
      leases_.push_back({s.memory, of(s).pin(s.handle), {blocks.begin(), blocks.end()}});
      return;
    }
    const int bt = config_.block_tokens, last = int(random_.below(blocks.size())),
              first = int(random_.below(size_t(last) + 1)), begin = first * bt + int(random_.below(size_t(bt))),
              end = std::max(begin, last * bt + int(random_.below(size_t(bt)))) + 1;
    const std::span<const int32_t> held = blocks.subspan(size_t(first), size_t(last - first + 1));
    leases_.push_back({s.memory, of(s).pin(s.handle, begin, end), {held.begin(), held.end()}});
  }

  void unpin() {
    size_t i = random_.below(leases_.size());
    memories_[leases_[i].memory]->unpin(leases_[i].lease);
    leases_.erase(leases_.begin() + ptrdiff_t(i));
  }

  void hand_over(size_t i) {
    if (handovers_.size() >= 2) return land();
    handovers_.push_back({of(live_[i]).handoff().hand_over(live_[i].handle), live_[i].salt, live_[i].tokens});
    REQUIRE(handovers_.back().handover.tokens == int(live_[i].tokens.size()));
    live_.erase(live_.begin() + ptrdiff_t(i));
  }

  void land() {
    size_t i = random_.below(handovers_.size());
    Flying f = handovers_[i];
    handovers_.erase(handovers_.begin() + ptrdiff_t(i));
    size_t memory = random_.below(memories_.size());
    if (random_.below(4) == 0) return memories_[memory]->handoff().discard(f.handover);
    KvHandle handle = memories_[memory]->handoff().adopt(f.handover, f.tokens, f.salt);
    live_.push_back({memory, handle, f.salt, f.tokens, {}});
  }

  void check(bool every_row) {
    for (auto& m : memories_) m->check_invariants(memories_.size() == 1);
    std::set<int32_t> active, held;
    for (Lease& l : leases_) held.insert(l.blocks.begin(), l.blocks.end());
    for (Flying& f : handovers_) held.insert(f.handover.blocks.begin(), f.handover.blocks.end());
    for (Live& s : live_)
      for (int32_t b : of(s).blocks(s.handle))
        if (!held.count(b)) active.insert(b);
    KvStats stats = memories_[0]->stats();
    REQUIRE(stats.free + stats.active + stats.cached + stats.in_transfer == stats.capacity);
    std::array<int, kKvStates> counted = {};
    for (KvState state : memories_[0]->states()) ++counted[size_t(state)];
    REQUIRE(counted == std::array{stats.free, stats.active, stats.cached, stats.in_transfer});
    REQUIRE(stats.active == int(active.size()));
    REQUIRE(stats.in_transfer == int(held.size()));
    if (!config_.prefix_cache || !paged_) REQUIRE(stats.cached == 0);
    size_t only = live_.empty() ? 0 : random_.below(live_.size());
    for (size_t i = 0; i < live_.size(); ++i) {
      REQUIRE(of(live_[i]).written_tokens(live_[i].handle) == int(live_[i].tokens.size()));
      if (every_row || i == only)
        REQUIRE(wrong_rows(of(live_[i]).view(live_[i].handle), live_[i].tokens, live_[i].salt) == 0);
    }
  }

  Config config_;
  Random random_;
  bool paged_;
  std::shared_ptr<BlockPool> pool_;
  std::vector<std::unique_ptr<KvMemory>> memories_;
  std::vector<Live> live_;
  std::vector<Lease> leases_;
  std::vector<Flying> handovers_;
  int hits_ = 0, copies_ = 0, refused_ = 0, drawn_ = 0;
  int within_ = 0, taken_over_ = 0, cut_ = 0;  // hits of a tree that end within a block
};

}  // namespace

TEST_CASE("KvMemory: random operations against a model, paged", "[allocator]") {
  for (int block_tokens : {1, 4, 16})
    for (bool prefix_cache : {true, false})
      for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
        CAPTURE(block_tokens, prefix_cache, int(order));
        int n_blocks = block_tokens == 1 ? 16 : 24;
        Trial({.block_tokens = block_tokens,
               .n_blocks = n_blocks,
               .prefix_cache = prefix_cache,
               .order = order,
               .operations = 10'000},
              uint64_t(block_tokens * 2 + prefix_cache))
            .run();
      }
}

TEST_CASE("KvMemory: random operations against a model, contiguous", "[allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (int memories : {1, 2})
      Trial({.scheme = "contiguous", .block_tokens = 24, .n_blocks = 5, .order = order, .memories = memories},
            uint64_t(memories))
          .run();
}

TEST_CASE("KvMemory: random operations against a model, two memories over one pool", "[allocator]") {
  for (bool prefix_cache : {true, false})
    Trial({.n_blocks = 34, .prefix_cache = prefix_cache, .memories = 2, .operations = 40'000}, 5).run();
}

TEST_CASE("KvMemory: random operations against a model, radix", "[allocator][radix]") {
  for (int block_tokens : {1, 3, 4, 16})
    for (int memories : {1, 2}) {
      CAPTURE(block_tokens, memories);
      Trial({.block_tokens = block_tokens,
             .n_blocks = block_tokens == 1 ? 16 : 24,
             .order = memories == 1 ? KvOrder::layer_major : KvOrder::token_major,
             .memories = memories,
             .operations = 30'000,
             .radix = true},
            uint64_t(block_tokens * 2 + memories))
          .run();
    }
}

TEST_CASE("KvMemory: random operations against a model, colliding hashes", "[allocator]") {
  for (uint64_t mask : {uint64_t{0}, uint64_t{3}, uint64_t{0xff}})
    Trial({.block_tokens = 2, .n_blocks = 40, .memories = 2, .hash_mask = mask}, 9 + mask).run();
}

}  // namespace xpyd::testing::kv_memory_random_test
