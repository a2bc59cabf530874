// Every scheme and every way to share a prefix: random operations against what each sequence wrote.
// A prompt begins like a document, like a sequence that ended or like one that lives, so that slots
// are shared, taken over, copied, evicted and forked in every order.
#include <algorithm>
#include <string>

#include "allocator/row_pool.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::sharing_random_test {

namespace {

constexpr int kOperations = 10'000;

struct Config {
  const char* scheme = "vattention";
  KvShare share = KvShare::off;
  KvOrder order = KvOrder::layer_major;
  bool map_ahead = true;
  int memories = 1;
  int head_dim = 2;
  int slot_chunk = 0;
};

class Trial {
 public:
  Trial(const Config& config, uint64_t seed) : config_(config), random_(seed) {
    o_.shape = kTinyShape;
    o_.shape.head_dim = config.head_dim;
    o_.order = config.order;
    o_.slot_chunk = config.slot_chunk;
    o_.vattention.share = config.share;
    o_.vattention.map_ahead = config.map_ahead;
    o_.keep_idle = config.memories == 1;
    o_.vattention.page_group_bytes = 4096;
    o_.vattention.max_sequences = 7;
    o_.vattention.guard = true;
    o_.block_tokens = 16;
    paged_ = config.scheme == std::string("paged") || config.scheme == std::string("token");
    const bool vattention = config.scheme == std::string("vattention");
    const int row = vattention_row_tokens(o_);
    o_.max_sequence_tokens = vattention ? 6 * row - 5 : 60;
    o_.pool_bytes = vattention ? 24 * vattention_row_bytes(o_) : 250 * o_.shape.token_bytes() + 100;
    pool_ = make_block_pool(config.scheme, o_).value();
    for (int i = 0; i < config.memories; ++i) memories_.push_back(find_kv_scheme(config.scheme)->make(pool_, o_));
    for (auto& document : documents_)
      for (int i = 0; i < o_.max_sequence_tokens; ++i) document.push_back(int32_t(random_.below(1000)));
  }

  void run() {
    for (int i = 0; i < kOperations; ++i) {
      step();
      check(i % 64 == 0);
    }
    for (auto& [memory, lease] : leases_) memories_[memory]->unpin(lease);
    leases_.clear();
    for (Flying& f : flying_) memories_[0]->handoff().discard(f.handover);
    flying_.clear();
    while (!live_.empty()) release(0);
    check(true);
    const KvStats stats = memories_[0]->stats();
    CHECK(stats.written_bytes == 0);
    CHECK((stats.in_transfer == 0 && stats.active == 0));
    const bool shares = config_.scheme != std::string("contiguous") &&
                        (config_.scheme != std::string("vattention") || config_.share != KvShare::off);
    // It was not vacuous.
    if (shares && o_.keep_idle) CHECK(hits > kOperations / 200);
    if (!shares) CHECK(hits == 0);
    if (config_.share == KvShare::alias) CHECK(aliased > kOperations / 100);
    CHECK(refused > kOperations / 100);
    CHECK(forked > kOperations / 100);
    CHECK(adopted > kOperations / 200);
    memories_.clear();
    CHECK(pool_->stats().free + pool_->stats().cached == pool_->stats().capacity);
  }

 private:
  struct Live {
    size_t memory;
    KvHandle handle;
    uint64_t salt;
    std::vector<int32_t> tokens;  // written
    std::vector<int32_t> prompt;  // still to write
    int pins = 0;
  };
  struct Flying {
    KvHandover handover;
    uint64_t salt;
    std::vector<int32_t> tokens;
  };

  void step() {
    const uint64_t what = random_.below(100);
    if (what < 22) return reserve();
    if (what < 26 && !leases_.empty()) return unpin();
    if (what < 30 && !flying_.empty()) return land();
    if (what == 30) return memories_[random_.below(memories_.size())]->clear_prefix_cache();
    if (live_.empty()) return;
    Live& s = live_[random_.below(live_.size())];
    KvMemory& kv = *memories_[s.memory];
    if (what < 66) return grow(s);
    if (what < 74) {
      Result<KvHandle> child = kv.fork(s.handle);
      if (!child) return void(++refused);
      ++forked;
      Live copy = s;
      copy.handle = child.value();
      copy.pins = 0;
      live_.push_back(copy);
    } else if (what < 78) {
      if (leases_.size() >= 3) return;
      const int begin = int(random_.below(s.tokens.size() + 1)),
                end = begin + 1 + int(random_.below(s.tokens.size() + 1));
      leases_.push_back({s.memory, kv.pin(s.handle, begin, end)}), ++s.pins;
    } else if (what < 83 && flying_.size() < 2 && s.pins == 0) {
      flying_.push_back({kv.handoff().hand_over(s.handle), s.salt, s.tokens});
      live_.erase(live_.begin() + (&s - live_.data()));
    } else if (what < 96) {
      release(size_t(&s - live_.data()));
    } else {
      kv.trim(s.handle);
    }
  }

  std::vector<int32_t> draw_prompt() {
    const uint64_t from = random_.below(10);
    std::vector<int32_t> prompt = from < 4 || live_.empty()    ? documents_[random_.below(2)]
                                  : from < 7 || ended_.empty() ? live_[random_.below(live_.size())].tokens
                                                               : ended_[random_.below(ended_.size())];
    if (random_.below(2) == 0) prompt.resize(random_.below(prompt.size() + 1));
    const size_t most = size_t(o_.max_sequence_tokens);
    prompt.resize(std::min(prompt.size(), most - 1));
    for (size_t n = 1 + random_.below(20); n > 0 && prompt.size() < most; --n)
      prompt.push_back(int32_t(random_.below(1000)));
    return prompt;
  }

  void reserve() {
    Live s{random_.below(memories_.size()), kNoKv, random_.below(2) * 77, {}, draw_prompt()};
    KvMemory& kv = *memories_[s.memory];
    const int found = kv.probe(s.prompt, s.salt);
    Result<KvReservation> r = kv.reserve(s.prompt, s.salt);
    if (!r) return void(++refused);
    s.handle = r.value().handle;
    const int cached = r.value().cached_tokens;
    REQUIRE(cached < int(s.prompt.size()));
    REQUIRE(cached <= found);  // less where rows are short
    REQUIRE(kv.written_tokens(s.handle) == cached);
    if (paged_ || config_.scheme == std::string("slots")) REQUIRE(cached == found);
    hits += cached > 0;
    s.tokens.assign(s.prompt.begin(), s.prompt.begin() + cached);
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + cached);
    if (cached > 0) REQUIRE(wrong(s) == 0);
    if (config_.share == KvShare::alias)
      for (int32_t row : kv.blocks(s.handle)) aliased += pool_->users(row) > 1;
    live_.push_back(s);
  }

  void grow(Live& s) {
    KvMemory& kv = *memories_[s.memory];
    const int left = o_.max_sequence_tokens - int(s.tokens.size());
    if (left == 0) return;
    int n = 1 + int(random_.below(size_t(std::min(left, random_.below(3) == 0 ? 400 : 9))));
    if (!s.prompt.empty()) n = std::min(n, int(s.prompt.size()));
    while (int(s.prompt.size()) < n) s.prompt.push_back(int32_t(random_.below(1000)));
    const KvStats before = kv.stats();
    const int row = before.block_tokens, has = int(kv.blocks(s.handle).size()),
              needs = (int(s.tokens.size()) + n + row - 1) / row - has + int(kv.tail_shared(s.handle));
    if (!kv.append(s.handle, n)) {
      ++refused;
      REQUIRE(needs > (memories_.size() == 1 ? before.available() : 0));  // a promise
      REQUIRE(int(kv.blocks(s.handle).size()) == has);
      if (random_.below(2) == 0) release(random_.below(live_.size()));
      return;
    }
    if (random_.below(10) == 0) return;  // room taken and not used
    const size_t done = s.tokens.size();
    s.tokens.insert(s.tokens.end(), s.prompt.begin(), s.prompt.begin() + n);
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + n);
    write(s, int(done));
    kv.written(s.handle, std::span<const int32_t>(s.tokens).subspan(done));
  }

  void unpin() {
    memories_[leases_.front().first]->unpin(leases_.front().second);
    leases_.erase(leases_.begin());
  }
  void land() {
    Flying f = std::move(flying_.back());
    flying_.pop_back();
    const size_t memory = random_.below(memories_.size());
    if (random_.below(8) == 0) return memories_[memory]->handoff().discard(f.handover);
    const KvHandle handle = memories_[memory]->handoff().adopt(f.handover, f.tokens, f.salt);
    if (handle == kNoKv) return;
    live_.push_back({memory, handle, f.salt, f.tokens, {}});
    ++adopted;
  }
  void release(size_t i) {
    memories_[live_[i].memory]->free(live_[i].handle);
    ended_.push_back(live_[i].tokens);
    if (ended_.size() > 4) ended_.erase(ended_.begin());
    live_.erase(live_.begin() + ptrdiff_t(i));
  }

  template <class F>
  void each(const Live& s, int begin, F&& f) {  // row address, its pattern
    const KvView view = memories_[s.memory]->view(s.handle);
    const std::vector<uint64_t> prefix = prefixes(s.tokens, s.salt);
    for (int t = begin; t < int(s.tokens.size()); ++t)
      for (int layer = 0; layer < o_.shape.n_layers; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int head = 0; head < o_.shape.n_kv_heads; ++head)
            f(view.row(layer, kv, t, head), row_pattern(prefix[size_t(t)], layer, kv, head));
  }
  void write(const Live& s, int begin) {
    each(s, begin, [](std::byte* row, uint64_t x) { std::memcpy(row, &x, sizeof x); });
  }
  int wrong(const Live& s) {
    int n = 0;
    each(s, 0, [&](std::byte* row, uint64_t x) { n += std::memcmp(row, &x, sizeof x) != 0; });
    return n;
  }

  void check(bool all) {
    for (auto& m : memories_) {
      m->check_invariants(memories_.size() == 1);
      const KvStats s = m->stats();
      REQUIRE(s.free + s.active + s.cached + s.in_transfer == s.capacity);
    }
    const size_t only = live_.empty() ? 0 : random_.below(live_.size());
    for (size_t i = 0; i < live_.size(); ++i) {
      const Live& s = live_[i];
      REQUIRE(memories_[s.memory]->written_tokens(s.handle) == int(s.tokens.size()));
      if (all || i == only) REQUIRE(wrong(s) == 0);
    }
  }

  const Config config_;
  Random random_;
  KvOptions o_;
  bool paged_;
  std::shared_ptr<KvPool> pool_;
  std::vector<std::unique_ptr<KvMemory>> memories_;
  std::vector<int32_t> documents_[2];
  std::vector<Live> live_;
  std::vector<Flying> flying_;
  std::vector<std::vector<int32_t>> ended_;
  std::vector<std::pair<size_t, KvLease>> leases_;
  int hits = 0, aliased = 0, refused = 0, forked = 0, adopted = 0;
};

void run(Config config) {
  CAPTURE(config.scheme, int(config.share), int(config.order), config.map_ahead, config.memories, config.head_dim);
  Trial(config, uint64_t(config.share) + 7).run();
}

}  // namespace

TEST_CASE("sharing: random operations, memory without page groups", "[allocator][sharing]") {
  for (const char* scheme : {"contiguous", "slots", "paged", "token"})
    for (int memories : {1, 2}) run({.scheme = scheme, .memories = memories});
  for (int chunk : {1, 3}) run({.scheme = "slots", .order = KvOrder::token_major, .slot_chunk = chunk});
}

TEST_CASE("sharing: random operations, vattention", "[allocator][vattention][sharing]") {
  for (KvShare share : {KvShare::off, KvShare::alias, KvShare::takeover, KvShare::copy})
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      run({.share = share, .order = order, .map_ahead = order == KvOrder::token_major});
}

TEST_CASE("sharing: random operations, vattention, two memories over one pool", "[allocator][vattention][sharing]") {
  for (KvShare share : {KvShare::alias, KvShare::copy}) run({.share = share, .memories = 2});
}

TEST_CASE("sharing: random operations, vattention, page groups that end inside a token",
          "[allocator][vattention][sharing]") {
  for (KvShare share : {KvShare::alias, KvShare::takeover, KvShare::copy}) run({.share = share, .head_dim = 6});
}

}  // namespace xpyd::testing::sharing_random_test
