// Runs random operations against a trivially correct model, which knows each sequence's tokens and which sequences hold
// each block. All schemes share one harness. A row chooses the scheme, the way of sharing prefixes, the offload tiers
// and the ranks.
#include <algorithm>
#include <set>
#include <thread>

#include "allocator/offload/offloaded_memory.h"
#include "allocator/schemes.h"
#include "allocator/vattention/page_group_rows.h"
#include "base/clock.h"
#include "base/device/device.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"
#include "tests/late_copies.h"

namespace xpyd::testing::kv_memory_random_test {

struct Row {
  const char* scheme = "paged";
  KvOrder order = KvOrder::layer_major;
  int operations = 10'000;
  uint64_t seed = 1;
  bool letters = false;  // prompts of two letters and few lengths; else prompts that begin like earlier ones
  int memories = 1;      // over one pool
  int tp = 1, pp = 1;
  int block_tokens = 16, n_blocks = 15;  // vattention: page-group rows
  int max_tokens = 60;                   // vattention, 0: six rows less five tokens
  bool prefix_cache = true, radix = false;
  uint64_t hash_mask = ~uint64_t{0};
  KvShare share = KvShare::off;
  bool map_ahead = true, guard = true;
  int head_dim = 2, slot_chunk = 0;
  size_t page_group = 0;                 // of the pool; 0: one allocation (vattention: 4096)
  int host_blocks = 0, disk_blocks = 0;  // offload tiers, in blocks of four tokens
  const char* eviction = "lru";
  uint64_t key_mask = ~uint64_t{0};
  bool faults = false;  // the disk fails at times
  bool is(const char* name) const { return name == std::string(scheme); }
};

constexpr int kTierBlock = 4, kMaxSequences = 7;

// Counts what the trials did, so that none is vacuous.
struct Counts {
  int64_t hits = 0, copies = 0, refused = 0, drawn = 0, forked = 0, adopted = 0, evicted = 0, aliased = 0;
  int64_t within = 0, taken_over = 0, cut = 0;  // radix hits that end within a block
  int64_t loads = 0, cancelled = 0, short_loads = 0;
  int64_t host_evictions = 0, disk_hit_tokens = 0, failures = 0;
};

// The contents of the tiers as a listener knows them.
class Picture final : public CacheListener {
 public:
  explicit Picture(std::vector<uint64_t> salts) : salts_(std::move(salts)) {}
  void stored(Tier tier, uint64_t hash, std::optional<uint64_t> parent, std::span<const int32_t> tokens) override {
    CHECK(tier != Tier::device);
    REQUIRE(tokens.size() == size_t(kTierBlock));
    CHECK(held_[int(tier)].insert(hash).second);
    const auto after = [&](uint64_t before) { return prefix_hash(before, !parent, tokens.data(), kTierBlock) == hash; };
    CHECK((parent ? after(*parent) : std::ranges::any_of(salts_, after)));
    ++told_[int(tier)];
  }
  void removed(Tier tier, uint64_t hash) override { CHECK(held_[int(tier)].erase(hash) == 1); }
  void check(const OffloadTiers& tiers) const {
    for (const Tier tier : {Tier::host, Tier::disk}) {
      const std::vector<uint64_t> there = tiers.held(tier);
      REQUIRE(std::set(there.begin(), there.end()) == held_[int(tier)]);
    }
  }
  int64_t told(Tier tier) const { return told_[int(tier)]; }

 private:
  const std::vector<uint64_t> salts_;
  std::set<uint64_t> held_[kTiers];
  int64_t told_[kTiers] = {};
};

class Trial {
 public:
  Trial(const Row& row, Counts& counts)
      : row_(row),
        blocks_(row.is("paged")),
        slots_(row.is("contiguous") || row.is("slots")),
        counts_(counts),
        random_(row.seed),
        fault_random_(row.seed + 1) {
    KvShards shards;
    o_.shape = kTinyShape;
    o_.shape.head_dim = row.head_dim;
    if (row.tp * row.pp > 1) {
      o_.shape.n_layers = 3;
      shards = {.n_layers = 3, .n_kv_heads = o_.shape.n_kv_heads, .tp = row.tp, .pp = row.pp};
    }
    o_.order = row.order, o_.block_tokens = row.block_tokens;
    o_.prefix_cache = row.prefix_cache, o_.radix = row.radix;
    o_.slot_chunk = row.slot_chunk;
    o_.pool_in_groups = row.page_group > 0;
    o_.vattention = {.page_group_bytes = row.page_group > 0 ? row.page_group : 4096,
                     .max_sequences = kMaxSequences,
                     .map_ahead = row.map_ahead,
                     .guard = row.guard,
                     .share = row.share};
    o_.max_sequence_tokens = row.letters && blocks_ ? 0 : row.max_tokens;
    if (row.is("vattention")) {
      if (row.max_tokens == 0) o_.max_sequence_tokens = 6 * vattention_row_tokens(o_) - 5;
      o_.pool_bytes = size_t(row.n_blocks * row.tp * row.pp) * vattention_row_bytes(o_);
    } else {
      const int block = slots_ ? row.max_tokens : row.block_tokens;
      const int replicas = row.tp > o_.shape.n_kv_heads ? row.tp / o_.shape.n_kv_heads : 1;  // copies of each head
      o_.pool_bytes = size_t(row.n_blocks * block * replicas) * o_.shape.token_bytes() + 7;
    }
    if (row.hash_mask == ~uint64_t{0})
      pool_ = make_ranked_pool(row.scheme, o_, shards).value();
    else
      pool_ = std::make_shared<BlockPool>(
          KvPlaces({o_.shape, o_.order, row.block_tokens, row.n_blocks}, cpu_device().allocate(o_.pool_bytes).value()),
          true, row.hash_mask);
    if (!row.is("vattention")) REQUIRE(pool_->layout().n_blocks == row.n_blocks);
    for (int m = 0; m < row.memories; ++m) memories_.push_back(find_kv_scheme(row.scheme)->make(pool_, o_));
    if (row.host_blocks > 0) add_tiers();
    most_ = o_.max_sequence_tokens > 0 ? o_.max_sequence_tokens : INT_MAX;
    for (auto& document : documents_)
      for (int i = 0; i < std::min(most_, 2000); ++i) document.push_back(int32_t(random_.below(1000)));
  }

  void run() {
    for (int i = 0; i < row_.operations; ++i) {
      step();
      check(i % 64 == 0);
    }
    // Everything can be released.
    for (Flying& f : flying_) memories_[0]->handoff().discard(f.handover);
    flying_.clear();
    while (!leases_.empty()) unpin();
    while (!live_.empty()) release(0);
    if (tiered_) tiered_->drain();
    check(true);
    const KvStats stats = first().stats();
    CHECK((stats.active == 0 && stats.in_transfer == 0 && stats.written_bytes == 0));
    for (auto& m : memories_) counts_.evicted += m->stats().evictions;
    first().clear_prefix_cache();
    if (tiered_) check_tiers_empty();
    if (blocks_) CHECK(first().stats().free == stats.capacity);
    memories_.clear();
    pool_->clear_prefix_cache();
    CHECK(pool_->stats().free == pool_->stats().capacity);
  }
  KvMemory& first() { return *memories_[0]; }
  std::vector<int64_t> log;  // the decisions of the memory

 private:
  struct Live {
    size_t memory;
    KvHandle handle;
    uint64_t salt;
    std::vector<int32_t> tokens;  // committed
    std::vector<int32_t> prompt;  // still to write, from the front
    int pins = 0, matched = 0;
    bool loading = false;
  };
  struct Lease {
    size_t memory;
    KvLease lease;
    std::vector<int32_t> blocks;  // that it holds
    // Tokens [begin, tokens.size()) at this place must not change.
    KvView view;
    std::vector<int32_t> table, tokens;
    int begin;
    uint64_t salt;
  };
  struct Flying {
    KvHandover handover;
    uint64_t salt;
    std::vector<int32_t> tokens;
  };

  void add_tiers() {
    OffloadOptions t{.host_bytes = size_t(row_.host_blocks * kTierBlock) * o_.shape.token_bytes(),
                     .block_tokens = kTierBlock,
                     .eviction = row_.eviction,
                     .listeners = {picture_}};
    if (row_.disk_blocks > 0)
      t.disk_dir = dir_.path, t.disk_bytes = size_t(row_.disk_blocks * kTierBlock) * o_.shape.token_bytes();
    OffloadTiers::Seams seams{.key_mask = row_.key_mask};
    if (row_.faults)
      seams.disk_fault = [this](bool write, std::span<std::byte> data, int result) {
        const uint64_t what = fault_random_.below(200);  // the first failure disables the disk
        if (write) return result;
        if (what == 0) data[fault_random_.below(data.size())] ^= std::byte{1};
        return what == 1 ? result / 2 : result;
      };
    // With a disk, a real copy thread may be as late as it likes. Otherwise every second look finds one more copy done.
    Device& device = row_.disk_blocks > 0 ? cpu_device() : static_cast<Device&>(device_);
    device_.slow = true;
    auto tiered = std::make_unique<OffloadedMemory>(
        std::move(memories_[0]), OffloadTiers::create(o_.shape, t, device, seams).value(), device, clock_);
    tiered_ = tiered.get();
    memories_[0] = std::move(tiered);
  }

  void check_tiers_empty() {
    tiered_->drain();  // blocks that were being written could not go
    tiered_->clear_prefix_cache();
    tiered_->check_invariants(true);
    picture_->check(tiered_->tiers());
    const OffloadStats s = tiered_->stats().tiers;
    CHECK(s.host_blocks + s.disk_blocks == 0);
    CHECK(picture_->told(Tier::host) > 0);
    CHECK((picture_->told(Tier::disk) > 0) == (s.disk_bytes_written > 0));
    counts_.host_evictions += s.host_evictions;
    counts_.disk_hit_tokens += s.disk_hit_tokens;
    counts_.failures += s.failed_reads;
  }

  KvMemory& of(const Live& s) { return *memories_[s.memory]; }
  bool exact() const { return blocks_ && !tiered_; }
  int block_tokens() const { return pool_->layout().block_tokens; }
  int blocks_for(size_t tokens) const { return (int(tokens) + block_tokens() - 1) / block_tokens(); }
  int users(int32_t block) {
    int64_t n = 0;
    for (const Live& s : live_) n += std::ranges::count(of(s).blocks(s.handle), block);
    for (const Flying& f : flying_) n += std::ranges::count(f.handover.blocks, block);
    return int(n);
  }
  int32_t draw_token() { return int32_t(random_.below(row_.letters ? 3 : 1000)); }

  std::vector<int32_t> draw_prompt() {
    std::vector<int32_t> prompt;
    if (row_.letters) {
      prompt.resize(1 + random_.below(size_t(std::min(most_, block_tokens() * 6))));
      int32_t letter = draw_token();
      for (int32_t& t : prompt) t = random_.below(16) == 0 ? letter = draw_token() : letter;
      return prompt;
    }
    const uint64_t from = random_.below(10);
    prompt = from < 4 || live_.empty()    ? documents_[random_.below(2)]
             : from < 7 || ended_.empty() ? live_[random_.below(live_.size())].tokens
                                          : ended_[random_.below(ended_.size())];
    if (random_.below(2) == 0) prompt.resize(random_.below(prompt.size() + 1));
    prompt.resize(std::min(prompt.size(), size_t(most_ - 1)));
    for (size_t n = 1 + random_.below(20); n > 0 && prompt.size() < size_t(most_); --n) prompt.push_back(draw_token());
    return prompt;
  }

  void step() {
    const uint64_t what = random_.below(100);
    if (what < 20) return live_.size() < 10 ? reserve() : release(random_.below(live_.size()));
    if (what == 20) return memories_[random_.below(memories_.size())]->clear_prefix_cache();
    if (what < 25 && !leases_.empty()) return unpin();
    if (what < 29 && !flying_.empty()) return land();
    if (what < 33 && tiered_) return settle();
    if (live_.empty()) return;
    Live& s = live_[random_.below(live_.size())];
    if (s.loading) return go_on(s, what);
    if (what < 63) return grow(s);
    if (what < 72) return fork(s);
    if (what < 76) return pin(s);
    if (what < 80 && blocks_) return hand_over(s);
    if (what < 91) return release(size_t(&s - live_.data()));
    if (what < 96) return rollback(s);
    reserve_blocks(s);
  }

  void reserve() {
    Live s{random_.below(memories_.size()), kNoKv, random_.below(2) * 77, {}, draw_prompt()};
    KvMemory& kv = of(s);
    const int found = kv.probe(s.prompt, s.salt), available = kv.stats().available();
    const int64_t copied_before = kv.stats().cow_copies;
    const Result<KvReservation> r = kv.reserve(s.prompt, s.salt);
    log.push_back(r ? r.value().cached_tokens : -1);
    if (blocks_) REQUIRE(r.ok());
    if (slots_ && !tiered_) REQUIRE(r.ok() == (available > 0));
    if (!r) REQUIRE(r.error().code == ErrorCode::unavailable);
    if (!r) return void(++counts_.refused);
    const int cached = r.value().cached_tokens;
    s.handle = r.value().handle, s.loading = r.value().loading, s.matched = cached;
    REQUIRE(cached < int(s.prompt.size()));
    if (exact()) {
      const int rows = cached % block_tokens();
      const bool whole = rows == 0 && cached == found / block_tokens() * block_tokens();
      // A radix hit loses the rows of the last block if there is no block to copy them to.
      REQUIRE((cached == found || (kv.stats().reserved_blocks > 0 && cached < found) ||
               (row_.radix && whole && kv.stats().available() <= 1)));
      REQUIRE(kv.stats().available() >= 0);
      const bool copied = kv.stats().cow_copies > copied_before;
      REQUIRE(copied <= (row_.radix && rows > 0));
      if (!row_.radix) REQUIRE(rows == 0);
      counts_.within += copied, counts_.taken_over += rows > 0 && !copied, counts_.cut += cached < found;
      if (rows > 0) REQUIRE(users(kv.blocks(s.handle).back()) == 0);  // no earlier sequence uses it
    } else if (!tiered_) {
      REQUIRE((slots_ ? cached == found : cached <= found));  // fewer if page-group rows are short
    }
    if (!row_.prefix_cache && !tiered_) REQUIRE(cached == 0);
    counts_.hits += cached > 0, counts_.loads += s.loading;
    if (row_.is("vattention"))
      for (int32_t row : kv.blocks(s.handle)) {
        counts_.aliased += pool_->users(row) > 1;
        if (row_.share != KvShare::alias) REQUIRE(pool_->users(row) == 1);
      }
    if (!s.loading) take(s, cached);
    live_.push_back(std::move(s));
  }

  void take(Live& s, int n) {
    s.tokens.assign(s.prompt.begin(), s.prompt.begin() + n);
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + n);
    s.loading = false;
    REQUIRE(of(s).written_tokens(s.handle) == n);
    REQUIRE(wrong(s) == 0);
  }

  // Continues a sequence whose KV is still loading from a tier.
  void go_on(Live& s, uint64_t what) {
    if (what < 45) {
      ++counts_.cancelled;
      return release(size_t(&s - live_.data()));
    }
    if (what < 70)
      while (!of(s).ready(s.handle)) std::this_thread::yield();
    check_ready(s);
  }
  void check_ready(Live& s) {
    if (!of(s).ready(s.handle)) return;
    const int n = of(s).written_tokens(s.handle);
    REQUIRE(n <= s.matched);
    counts_.short_loads += n < s.matched;
    take(s, n);
  }
  // A disk takes as long as thousands of operations here.
  void settle() {
    if (random_.below(2) == 0) tiered_->drain();
    tiered_->poll();
    for (Live& s : live_)
      if (s.loading) check_ready(s);
  }
  void grow(Live& s) {
    KvMemory& kv = of(s);
    const size_t left = size_t(most_) - s.tokens.size();
    if (left == 0) return;
    const size_t some = row_.letters ? 2 * size_t(block_tokens()) : random_.below(3) == 0 ? 400 : 9;
    size_t n = 1 + random_.below(std::min(left, some));
    if (!s.prompt.empty()) n = std::min(n, s.prompt.size());
    while (s.prompt.size() < n) s.prompt.push_back(draw_token());  // decode

    const bool copy = exact() && s.tokens.size() % size_t(block_tokens()) != 0 &&
                      users(kv.blocks(s.handle)[s.tokens.size() / size_t(block_tokens())]) > 1;
    if (exact()) REQUIRE(kv.tail_shared(s.handle) == copy);
    const std::vector<int32_t> before(kv.blocks(s.handle).begin(), kv.blocks(s.handle).end());
    const KvStats stats = kv.stats();
    if (exact()) REQUIRE(kv.append(s.handle, 0));  // nothing to write, so nothing to copy
    const int more = std::max(0, blocks_for(s.tokens.size() + n) - int(before.size())) + int(copy);
    const int drawn = std::min(more, kv.held(s.handle).reserved);
    const bool fits = kv.append(s.handle, int(n));
    log.push_back(fits);
    if (exact()) {
      REQUIRE(fits == (more - drawn <= stats.available()));
      REQUIRE(stats.reserved_blocks - kv.stats().reserved_blocks == (fits ? drawn : 0));
      REQUIRE(kv.stats().cow_copies - stats.cow_copies == (fits && copy));
      const int64_t evicted = kv.stats().evictions - stats.evictions, needed = std::max(0, more - stats.free);
      // A block leaves a radix tree with all that continues it.
      if (fits) REQUIRE((row_.radix ? evicted >= needed : evicted == needed));
    } else if (!fits && !tiered_) {
      REQUIRE(more > (memories_.size() == 1 ? stats.available() : 0));  // available() is a guarantee
    }
    if (!fits) {
      ++counts_.refused;
      if (!tiered_) REQUIRE(std::ranges::equal(kv.blocks(s.handle), before));
      const KvStats after = kv.stats();
      if (exact())
        REQUIRE((after.free == stats.free && after.cached == stats.cached && after.evictions == stats.evictions));
      if (random_.below(2) == 0) release(random_.below(live_.size()));  // a preemption
      return;
    }
    counts_.drawn += drawn, counts_.copies += copy;
    if (random_.below(8) == 0) return;  // memory is reserved and not used
    const size_t done = s.tokens.size(), some_of_it = random_.below(4) == 0 ? 1 + random_.below(n) : n;
    s.tokens.insert(s.tokens.end(), s.prompt.begin(), s.prompt.begin() + ptrdiff_t(some_of_it));
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + ptrdiff_t(some_of_it));
    write(s, s.tokens, int(done));
    kv.commit(s.handle, std::span<const int32_t>(s.tokens).subspan(done));
  }

  // A reservation is only a number: nothing moves, and all other sequences have less available.
  void reserve_blocks(const Live& s) {
    if (!exact()) return;
    KvMemory& kv = of(s);
    const KvStats before = kv.stats();
    const size_t left = size_t(most_) - s.tokens.size();
    const int n = int(random_.below(std::min(4 * size_t(block_tokens()), left + 1)));
    const KvHeld held = kv.held(s.handle);
    const int need = std::max(0, blocks_for(s.tokens.size() + size_t(n)) - int(held.blocks.size())) +
                     int(n > 0 && held.tail_shared);
    const bool fits = kv.reserve_blocks(s.handle, n);
    REQUIRE(fits == (need - held.reserved <= std::max(0, before.available())));
    const KvStats after = kv.stats();
    REQUIRE(kv.held(s.handle).reserved == (fits ? need : held.reserved));
    REQUIRE(before.available() - after.available() == (fits ? need - held.reserved : 0));
    REQUIRE((after.free == before.free && after.cached == before.cached && after.evictions == before.evictions));
  }

  void rollback(const Live& s) {
    of(s).rollback(s.handle);
    if (blocks_) REQUIRE(int(of(s).blocks(s.handle).size()) == blocks_for(s.tokens.size()));
  }

  void fork(const Live& s) {
    const int available = of(s).stats().available();
    const Result<KvHandle> child = of(s).fork(s.handle);
    log.push_back(child ? child.value() : -1);
    if (blocks_ || (slots_ && !tiered_)) REQUIRE(child.ok() == (blocks_ || available > 0));
    if (!child) return void(++counts_.refused);
    ++counts_.forked;
    Live copy = s;
    copy.handle = child.value(), copy.pins = 0;
    live_.push_back(std::move(copy));
  }

  void pin(Live& s) {
    if (leases_.size() >= 3) return unpin();
    int begin = 0, end = INT_MAX;
    if (random_.below(2)) {
      begin = int(random_.below(s.tokens.size() + 1));
      end = begin + 1 + int(random_.below(s.tokens.size() + 1));
    }
    const std::span<const int32_t> all = of(s).blocks(s.handle);
    const size_t first = row_.is("vattention") ? 0 : size_t(begin / block_tokens()),
                 last = std::min(all.size(), size_t((end - 1) / block_tokens()) + 1);
    const std::span<const int32_t> held = first < last ? all.subspan(first, last - first) : all.first(0);
    Lease lease{s.memory,
                of(s).pin(s.handle, begin, end),
                {held.begin(), held.end()},
                of(s).view(s.handle),
                {},
                s.tokens,
                begin,
                s.salt};
    lease.table.assign(all.begin(), all.end());
    lease.tokens.resize(std::min(lease.tokens.size(), size_t(end)));
    leases_.push_back(std::move(lease)), ++s.pins;
  }
  void unpin() {
    const size_t i = random_.below(leases_.size());
    Lease& l = leases_[i];
    if (l.view.block_table) l.view.block_table = l.table.data();
    const KvRect own = rect(0);
    int wrong = 0;
    each(l.view, own, l.tokens, l.salt, l.begin,
         [&](const std::byte* row, uint64_t x, int) { wrong += std::memcmp(row, &x, sizeof x) != 0; });
    REQUIRE(wrong == 0);
    memories_[l.memory]->unpin(l.lease);
    leases_.erase(leases_.begin() + ptrdiff_t(i));
  }

  void hand_over(const Live& s) {
    if (flying_.size() >= 2) return land();
    flying_.push_back({of(s).handoff().hand_over(s.handle), s.salt, s.tokens});
    REQUIRE(flying_.back().handover.tokens == int(s.tokens.size()));
    live_.erase(live_.begin() + (&s - live_.data()));
  }
  void land() {
    const size_t i = random_.below(flying_.size()), memory = random_.below(memories_.size());
    Flying f = std::move(flying_[i]);
    flying_.erase(flying_.begin() + ptrdiff_t(i));
    if (random_.below(6) == 0) return memories_[memory]->handoff().discard(f.handover);
    const std::vector<int32_t> blocks = f.handover.blocks;
    const KvHandle handle = memories_[memory]->handoff().adopt(f.handover, f.tokens, f.salt);
    REQUIRE(handle != kNoKv);
    REQUIRE(std::ranges::equal(memories_[memory]->blocks(handle), blocks));  // no byte moves
    live_.push_back({memory, handle, f.salt, f.tokens, {}});
    REQUIRE(wrong(live_.back()) == 0);
    ++counts_.adopted;
  }

  void release(size_t i) {
    of(live_[i]).free(live_[i].handle);
    if (!live_[i].loading) ended_.push_back(live_[i].tokens);
    if (ended_.size() > 4) ended_.erase(ended_.begin());
    live_.erase(live_.begin() + ptrdiff_t(i));
  }

  KvRect rect(int rank) {
    const KvShards* shards = pool_->places().shards ? &*pool_->places().shards : nullptr;
    return shards ? shards->rect(rank) : KvRect{{0, o_.shape.n_layers}, {0, o_.shape.n_kv_heads}};
  }
  template <class F>  // f(row address, its pattern, its layer)
  void each(const KvView& view, const KvRect& own, std::span<const int32_t> tokens, uint64_t salt, int begin, F&& f) {
    const std::vector<uint64_t> prefix = prefixes(tokens, salt);
    for (int t = begin; t < int(tokens.size()); ++t)
      for (int l = own.layers.begin; l < own.layers.end; ++l)
        for (int v = 0; v < 2; ++v)
          for (int h = own.heads.begin; h < own.heads.end; ++h)
            f(view.row(l - own.layers.begin, v, t, h - own.heads.begin), row_pattern(prefix[size_t(t)], l, v, h), l);
  }
  template <class F>
  void each(const Live& s, std::span<const int32_t> tokens, int begin, F&& f) {
    for (int rank = 0; rank < of(s).n_ranks(); ++rank)
      each(of(s).view(s.handle, rank), rect(rank), tokens, s.salt, begin, f);
  }
  void write(const Live& s, std::span<const int32_t> tokens, int begin) {
    each(s, tokens, begin, [](std::byte* row, uint64_t x, int) { std::memcpy(row, &x, sizeof x); });
  }
  int wrong(const Live& s) { return wrong(s, s.tokens, -1); }
  int wrong(const Live& s, std::span<const int32_t> tokens, int layer) {  // -1: all
    int n = 0;
    each(s, tokens, 0, [&](const std::byte* row, uint64_t x, int l) {
      n += (layer < 0 || l == layer) && std::memcmp(row, &x, sizeof x) != 0;
    });
    return n;
  }

  void check(bool every_row) {
    for (auto& m : memories_) m->check_invariants(memories_.size() == 1);
    const KvStats stats = first().stats();
    REQUIRE(stats.free + stats.active + stats.cached + stats.in_transfer == stats.capacity);
    if (tiered_) {
      picture_->check(tiered_->tiers());
    } else {
      std::set<int32_t> active, held;
      for (const Lease& l : leases_) held.insert(l.blocks.begin(), l.blocks.end());
      for (const Flying& f : flying_) held.insert(f.handover.blocks.begin(), f.handover.blocks.end());
      for (const Live& s : live_)
        for (int32_t b : of(s).blocks(s.handle))
          if (!held.count(b)) active.insert(b);
      std::array<int, kKvStates> counted = {};
      for (KvState state : first().states()) ++counted[size_t(state)];
      REQUIRE(counted == std::array{stats.free, stats.active, stats.cached, stats.in_transfer});
      REQUIRE(stats.in_transfer == int(held.size()));
      // Rows that a lease kept in its slot go with the next rollback.
      if (!row_.is("vattention") || std::ranges::all_of(live_, [](const Live& s) { return s.pins == 0; }))
        REQUIRE(stats.active == int(active.size()));
      REQUIRE(stats.active >= int(active.size()));
      if (row_.is("contiguous") || (blocks_ && !row_.prefix_cache)) REQUIRE(stats.cached == 0);
    }
    const size_t only = live_.empty() ? 0 : random_.below(live_.size());
    for (size_t i = 0; i < live_.size(); ++i) {
      const Live& s = live_[i];
      if (s.loading) continue;
      REQUIRE(of(s).written_tokens(s.handle) == int(s.tokens.size()));
      if (every_row || i == only) REQUIRE(wrong(s) == 0);
    }
  }

  const Row row_;
  const bool blocks_, slots_;  // blocks are counted one by one; a sequence is one slot
  Counts& counts_;
  Random random_, fault_random_;
  KvOptions o_;
  int most_ = 0;  // largest number of tokens of a sequence
  const std::shared_ptr<Picture> picture_ = std::make_shared<Picture>(std::vector<uint64_t>{0, 77});
  TempDir dir_;
  LateCopies device_;
  RealClock clock_;
  std::shared_ptr<KvPool> pool_;
  std::vector<std::unique_ptr<KvMemory>> memories_;
  OffloadedMemory* tiered_ = nullptr;  // the first memory
  std::vector<int32_t> documents_[2];
  std::vector<std::vector<int32_t>> ended_;
  std::vector<Live> live_;
  std::vector<Lease> leases_;
  std::vector<Flying> flying_;
};

Counts run(const Row& r) {
  CAPTURE(r.scheme, int(r.order), r.memories, r.block_tokens, r.prefix_cache, r.radix, r.hash_mask, int(r.share),
          r.head_dim, r.slot_chunk, r.seed);
  Counts n;
  Trial(r, n).run();
  const int often = r.operations / 200;
  const bool shares = !r.is("contiguous") && r.prefix_cache && (!r.is("vattention") || r.share != KvShare::off);
  CHECK((shares ? n.hits > often : n.hits == 0));
  CHECK(n.refused > often);
  CHECK(n.forked > often);
  if (r.is("paged")) CHECK(n.adopted > often);
  if (shares && r.share == KvShare::alias) CHECK(n.aliased > often);
  if (r.is("paged") && r.prefix_cache) CHECK(n.evicted > often);
  if (r.is("paged") && r.block_tokens > 1) CHECK(n.copies > often);
  if (r.is("paged")) CHECK(n.drawn > 10);
  if (r.radix && r.block_tokens > 1) CHECK(std::min({n.within, n.taken_over, n.cut}) > 10);
  return n;
}

// A row with few letters and this block size.
Row letters(int block_tokens, int n_blocks, int operations, uint64_t seed, int memories = 1) {
  Row r{.operations = operations, .seed = seed, .letters = true, .memories = memories};
  r.block_tokens = block_tokens, r.n_blocks = n_blocks;
  return r;
}

Row vattention(KvShare share) {
  Row r{.scheme = "vattention", .operations = 6'000, .seed = uint64_t(share) + 7, .share = share};
  r.n_blocks = 24, r.max_tokens = 0;
  return r;
}

TEST_CASE("KvMemory: paged memory equals a plain model under random operations", "[allocator]") {
  for (bool prefix_cache : {true, false}) {
    for (int block_tokens : {1, 4, 16})
      for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
        Row r = letters(block_tokens, block_tokens == 1 ? 16 : 24, 10'000, uint64_t(block_tokens * 2 + prefix_cache));
        r.order = order, r.prefix_cache = prefix_cache;
        run(r);
      }
    Row r = letters(4, 34, 20'000, 5, 2);
    r.prefix_cache = prefix_cache;
    run(r);
  }
  for (uint64_t mask : {uint64_t{0}, uint64_t{3}, uint64_t{0xff}}) {  // hashes collide
    Row r = letters(2, 40, 20'000, 9 + mask, 2);
    r.hash_mask = mask;
    run(r);
  }
}

TEST_CASE("KvMemory: radix prefix caching equals a plain model under random operations", "[allocator][radix]") {
  for (int block_tokens : {1, 3, 4, 16})
    for (int memories : {1, 2}) {
      Row r = letters(block_tokens, block_tokens == 1 ? 16 : 24, 12'000, uint64_t(block_tokens * 2 + memories),
                      memories);
      r.radix = true;
      if (memories == 2) r.order = KvOrder::token_major;
      run(r);
    }
}

TEST_CASE("KvMemory: every scheme without page groups equals a plain model under random operations",
          "[allocator][sharing]") {
  for (auto [scheme, n_blocks] : {std::pair{"contiguous", 4}, {"slots", 4}, {"paged", 15}})
    run({.scheme = scheme, .seed = 7, .n_blocks = n_blocks});
  run({.seed = 7, .memories = 2, .n_blocks = 15});
  for (size_t group : {size_t{4096}, size_t{2} << 20})
    for (auto [scheme, n_blocks] : {std::pair{"contiguous", 4}, {"paged", 15}})
      run({.scheme = scheme, .operations = 3'000, .seed = 8, .n_blocks = n_blocks, .page_group = group});
  for (int chunk : {1, 3})
    run({.scheme = "slots", .order = KvOrder::token_major, .seed = 7, .n_blocks = 4, .slot_chunk = chunk});
}

TEST_CASE("KvMemory: vattention equals a plain model under random operations", "[allocator][vattention][sharing]") {
  for (KvShare share : {KvShare::off, KvShare::alias, KvShare::takeover, KvShare::copy}) {
    const Row row = vattention(share);
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
      Row r = row;
      r.order = order, r.map_ahead = order == KvOrder::token_major, r.guard = share != KvShare::copy;
      run(r);
    }
    Row inside = row, unused = row;
    inside.head_dim = 6;  // groups end inside a token
    if (share == KvShare::takeover) inside.order = KvOrder::token_major;
    if (share != KvShare::off) run(inside);
    unused.prefix_cache = false, unused.operations = 2'000;
    if (share == KvShare::alias) run(unused);
  }
}

constexpr std::pair<int, int> kRanks[] = {{2, 1}, {4, 1}, {1, 3}, {2, 2}};

TEST_CASE("KvMemory: memory on several ranks equals a plain model under random operations", "[allocator][shards]") {
  std::vector<Row> rows = {{"paged"}, {"contiguous"}, {"slots"}};
  for (KvShare share : {KvShare::off, KvShare::alias, KvShare::takeover, KvShare::copy})
    rows.push_back(vattention(share));
  for (const char* scheme : {"paged", "contiguous", "vattention"})
    rows.push_back({.scheme = scheme, .prefix_cache = false, .host_blocks = 40});
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (Row r : rows) {
      Counts n;
      r.order = order, r.operations = 400, r.block_tokens = 4;
      r.n_blocks = r.is("paged") ? 24 : 6;
      if (r.is("vattention")) r.max_tokens = 600;
      INFO(r.scheme << " order " << int(order) << " share " << int(r.share) << " host " << r.host_blocks);
      for (const auto& [tp, pp] : kRanks) {
        if (r.is("vattention") && order == KvOrder::token_major && pp == 2) continue;  // refused
        r.seed = uint64_t(tp * 8 + pp), r.tp = tp, r.pp = pp;
        INFO("tp " << tp << " pp " << pp);
        Trial(r, n).run();
      }
      CHECK((n.hits > 0) ==
            (r.host_blocks > 0 || r.share != KvShare::off || !(r.is("contiguous") || r.is("vattention"))));
      CHECK(n.forked > 5);
      if (r.is("paged")) CHECK(n.adopted > 5);
    }
}

TEST_CASE("KvMemory: memory on ranks decides like one memory with as many blocks", "[allocator][shards]") {
  for (auto [scheme, n_blocks] : {std::pair{"paged", 24}, {"contiguous", 6}, {"slots", 6}}) {
    Row r{.scheme = scheme, .operations = 500, .seed = 4, .block_tokens = 4, .n_blocks = n_blocks};
    Counts of_one;
    Trial one(r, of_one);
    const KvStats a = one.first().stats();
    one.run();
    CHECK(of_one.refused > 3);
    for (const auto& [tp, pp] : kRanks) {
      INFO(scheme << " tp " << tp << " pp " << pp);
      r.tp = tp, r.pp = pp;
      Counts of_many;
      Trial many(r, of_many);
      const KvStats b = many.first().stats();
      CHECK(a.capacity == b.capacity);
      // Bytes are summed over ranks: a block of every rank, with three layers instead of two, and with its copies of
      // heads.
      CHECK(2 * (b.capacity_bytes - b.external_bytes) ==
            3 * std::max(1, tp / 2) * (a.capacity_bytes - a.external_bytes));
      many.run();
      CHECK((many.log == one.log));  // in brackets, so that a failure does not print all of it
      CHECK(of_many.hits == of_one.hits);
    }
  }
}

TEST_CASE("tiers: offload tiers equal a plain model under random operations", "[tiers][random]") {
  uint64_t seed = 0;
  Counts totals, sharing;
  for (const char* scheme : {"paged", "contiguous", "vattention"})
    for (auto [disk, faults] : {std::pair{0, false}, {24, false}, {24, true}}) {
      ++seed;
      Row r{.scheme = scheme, .faults = faults};
      r.order = seed % 2 ? KvOrder::layer_major : KvOrder::token_major;
      r.block_tokens = 4, r.n_blocks = r.is("contiguous") ? 8 : 16;
      r.max_tokens = 32, r.prefix_cache = seed % 4 == 0 && !r.is("vattention");
      if (r.is("vattention")) r.max_tokens = 128, r.n_blocks = seed % 2 ? 6 : 24;
      r.host_blocks = disk ? 10 : 16, r.disk_blocks = disk;
      r.eviction = kEvictionPolicies[seed % std::size(kEvictionPolicies)].name;
      if (seed % 2) r.key_mask = 7;  // collisions
      INFO(scheme << " disk " << disk << " faults " << faults << " seed " << seed);
      r.operations = 12'000, r.seed = 2 * seed;
      Trial(r, totals).run();
    }
  for (int disk : {0, 24}) {  // the pool's own hits end within its blocks and within those of the tiers
    Row r{.operations = 6'000, .seed = 50, .block_tokens = 4, .n_blocks = 16, .max_tokens = 32, .radix = true};
    r.host_blocks = 16, r.disk_blocks = disk;
    Trial(r, totals).run();
  }
  // Page-group rows of 64 tokens, which sequences share by a second mapping.
  for (uint64_t trial = 0; trial < 6; ++trial) {
    Row r = vattention(KvShare::alias);
    r.order = KvOrder::token_major, r.operations = 4'000, r.seed = 99 + trial, r.max_tokens = 160, r.host_blocks = 60;
    Trial(r, sharing).run();
  }
  CHECK((sharing.aliased > 10 && sharing.loads > 20));
  CHECK((totals.loads > 1000 && totals.short_loads > 0));
  CHECK(totals.cancelled > 100);
  CHECK((totals.host_evictions > 1000 && totals.disk_hit_tokens > 500));
  CHECK(totals.failures > 0);
}

}  // namespace xpyd::testing::kv_memory_random_test
