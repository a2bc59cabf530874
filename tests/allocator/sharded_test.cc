// One memory on several ranks: every rank holds its rectangle of every sequence, whatever the
// scheme, and all of them the same blocks.
#include <algorithm>
#include <map>
#include <thread>

#include "allocator/kv_plan.h"
#include "allocator/tiered.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::sharded_test {
namespace {

constexpr KvShape kWhole{.n_layers = 3, .n_kv_heads = 2, .head_dim = 2};
constexpr int kMaxTokens = 40;

KvShards shards(int tp, int pp) {
  return {.n_layers = kWhole.n_layers, .n_kv_heads = kWhole.n_kv_heads, .tp = tp, .pp = pp};
}

KvOptions options_of(const std::string& scheme, KvOrder order, int n_ranks, int blocks = 24) {
  KvOptions o;
  o.shape = kWhole;
  o.order = order;
  o.block_tokens = 4;
  o.max_sequence_tokens = kMaxTokens;
  o.vattention.max_sequences = 8;
  o.vattention.page_group_bytes = 4096;
  if (scheme == "vattention") {
    o.max_sequence_tokens = 600;
    o.pool_bytes = size_t(n_ranks) * 40 * 4096;
  } else {
    const int tokens = scheme == "paged" || scheme == "token" ? 4 * blocks : 8 * kMaxTokens;
    // Copies of heads take their bytes, too.
    o.pool_bytes = size_t(tokens) * kWhole.token_bytes() * 2;
  }
  return o;
}

// f(row, pattern) for tokens [begin, end) in all ranks.
template <class F>
void each_row_of_ranks(const KvMemory& kv, KvHandle handle, std::span<const int32_t> tokens, uint64_t salt, int begin,
                       F&& f) {
  const std::vector<uint64_t> prefix = prefixes(tokens, salt);
  for (int rank = 0; rank < kv.n_ranks(); ++rank) {
    const KvRect own = kv.shards() ? kv.shards()->rect(rank) : KvRect{{0, 3}, {0, 2}};
    const KvView view = kv.view(handle, rank);
    for (int t = begin; t < int(tokens.size()); ++t)
      for (int l = own.layers.begin; l < own.layers.end; ++l)
        for (int v = 0; v < 2; ++v)
          for (int h = own.heads.begin; h < own.heads.end; ++h)
            f(view.row(l - own.layers.begin, v, t, h - own.heads.begin), row_pattern(prefix[size_t(t)], l, v, h));
  }
}
void compute(KvMemory& kv, KvHandle handle, std::span<const int32_t> tokens, uint64_t salt, int from) {
  each_row_of_ranks(kv, handle, tokens, salt, from, [](std::byte* row, uint64_t p) { std::memcpy(row, &p, sizeof p); });
}
int wrong(const KvMemory& kv, KvHandle handle, std::span<const int32_t> tokens, uint64_t salt) {
  int n = 0;
  each_row_of_ranks(kv, handle, tokens, salt, 0,
                    [&](const std::byte* row, uint64_t p) { n += std::memcmp(row, &p, sizeof p) != 0; });
  return n;
}

struct Case {
  const char* scheme;
  KvOrder order;
  KvShare share = KvShare::off;
  bool tiers = false;
};

std::unique_ptr<KvMemory> make(const Case& c, const KvShards& s) {
  KvOptions o = options_of(c.scheme, c.order, s.n_ranks());
  o.vattention.share = c.share;
  Result<PoolPlan> plan = plan_ranks(c.scheme, o, s);
  INFO(c.scheme << ": " << (plan ? "" : plan.error().message));
  REQUIRE(plan.ok());
  std::unique_ptr<KvMemory> kv = make_ranked_memory(c.scheme, o, s).value();
  if (!c.tiers) return kv;
  o.tiers.host_bytes = 40 * 4 * kWhole.token_bytes();
  o.tiers.block_tokens = 4;
  return make_tiered(std::move(kv), o).value();
}

struct Run {
  std::vector<int64_t> log;  // of decisions
  int64_t hits = 0, refused = 0, checked = 0;
};

// Sequences come, share beginnings, grow, fork, are pinned, handed over and end.
Run random_run(KvMemory& kv, uint64_t seed, int operations) {
  struct Live {
    KvHandle handle;
    uint64_t salt;
    std::vector<int32_t> tokens;
  };
  Random random(seed);
  auto below = [&](int n) { return int(random.below(uint64_t(n))); };
  std::vector<Live> live;
  std::vector<KvLease> leases;
  Run run;
  for (int i = 0; i < operations; ++i) {
    const int what = below(10);
    if (what < 4) {
      std::vector<int32_t> prompt;
      const int family = below(3), n = 1 + below(30), own = below(n + 1);
      for (int t = 0; t < n; ++t) prompt.push_back(family * 100 + t + (t < own ? 0 : 1000 * below(3)));
      const uint64_t salt = uint64_t(below(4) == 0);
      Result<KvReservation> r = kv.reserve(prompt, salt);
      run.log.push_back(r ? r.value().cached_tokens : -1);
      if (!r) {
        ++run.refused;
        continue;
      }
      const KvHandle handle = r.value().handle;
      while (!kv.ready(handle)) std::this_thread::yield();
      const int cached = kv.written_tokens(handle);
      run.hits += cached;
      REQUIRE(wrong(kv, handle, std::span(prompt).first(size_t(cached)), salt) == 0);
      if (!kv.append(handle, n - cached)) {
        ++run.refused;
        kv.free(handle);
        continue;
      }
      compute(kv, handle, prompt, salt, cached);
      kv.written(handle, std::span(prompt).subspan(size_t(cached)));
      live.push_back({handle, salt, prompt});
    } else if (live.empty()) {
      continue;
    } else {
      Live& s = live[size_t(below(int(live.size())))];
      if (what < 7) {
        if (int(s.tokens.size()) + 3 > kMaxTokens) continue;
        const bool done = kv.append(s.handle, 3);
        run.log.push_back(done);
        if (!done) {
          ++run.refused;
          continue;
        }
        const int from = int(s.tokens.size()), n = 1 + below(3);
        for (int t = 0; t < n; ++t) s.tokens.push_back(below(50));
        compute(kv, s.handle, s.tokens, s.salt, from);
        kv.written(s.handle, std::span(s.tokens).subspan(size_t(from)));
        if (below(2)) kv.trim(s.handle);
      } else if (what == 7) {
        Result<KvHandle> child = kv.fork(s.handle);
        run.log.push_back(child ? child.value() : -1);
        if (child) live.push_back({child.value(), s.salt, s.tokens});
      } else if (what == 8 && leases.size() < 3) {
        leases.push_back(kv.pin(s.handle));
      } else {
        REQUIRE(wrong(kv, s.handle, s.tokens, s.salt) == 0);
        kv.free(s.handle);
        s = live.back();
        live.pop_back();
      }
    }
    if (!leases.empty() && below(8) == 0) {
      kv.unpin(leases.back());
      leases.pop_back();
    }
    if (i % 16 == 0) {
      kv.check_invariants(true);
      for (const Live& s : live) {
        REQUIRE(wrong(kv, s.handle, s.tokens, s.salt) == 0);
        ++run.checked;
      }
    }
  }
  for (const KvLease lease : leases) kv.unpin(lease);
  for (const Live& s : live) kv.free(s.handle);
  kv.check_invariants(true);
  return run;
}

TEST_CASE("sharded memory: every scheme, shape and share holds what was written, on each rank", "[shards][allocator]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (const Case& c : {Case{"paged", order}, Case{"token", order}, Case{"contiguous", order}, Case{"slots", order},
                          Case{"vattention", order}, Case{"vattention", order, KvShare::alias},
                          Case{"vattention", order, KvShare::takeover}, Case{"vattention", order, KvShare::copy},
                          Case{"paged", order, KvShare::off, true}, Case{"contiguous", order, KvShare::off, true},
                          Case{"vattention", order, KvShare::off, true}}) {
      int64_t hits = 0, checked = 0;
      const std::string name = c.scheme;
      for (auto [tp, pp] : {std::pair(1, 1), {2, 1}, {4, 1}, {1, 3}, {2, 2}}) {
        const KvShards s = shards(tp, pp);
        if (name == "vattention" && order == KvOrder::token_major && pp == 2) continue;  // refused
        INFO(name << " order " << int(order) << " share " << int(c.share) << " tiers " << c.tiers << " tp " << tp
                  << " pp " << pp);
        const std::unique_ptr<KvMemory> kv = make(c, s);
        REQUIRE(kv->n_ranks() == tp * pp);
        CHECK(kv->layout().shape == kWhole);
        const Run run = random_run(*kv, uint64_t(tp * 8 + pp), 400);
        hits += run.hits;
        checked += run.checked;
      }
      INFO(name << " order " << int(order) << " share " << int(c.share) << " tiers " << c.tiers);
      CHECK(checked > 50);
      const bool reuses = c.tiers || name == "paged" || name == "token" || name == "slots" || c.share != KvShare::off;
      CHECK((hits > 0) == reuses);
    }
}

TEST_CASE("sharded memory: decides as one memory with as many blocks", "[shards][allocator]") {
  for (const char* scheme : {"paged", "token", "contiguous", "slots"})
    for (auto [tp, pp] : {std::pair(2, 1), {4, 1}, {1, 3}, {2, 2}}) {
      const KvShards s = shards(tp, pp);
      KvOptions one = options_of(scheme, KvOrder::layer_major, 1), many = one;
      many.pool_bytes *= size_t(s.replicas());
      INFO(scheme << " tp " << tp << " pp " << pp);
      const auto a = make_ranked_memory(scheme, one, shards(1, 1)).value();
      const auto b = make_ranked_memory(scheme, many, s).value();
      REQUIRE(a->stats().capacity == b->stats().capacity);
      const Run expected = random_run(*a, 4, 500);
      CHECK(random_run(*b, 4, 500).log == expected.log);
      CHECK(expected.refused > 3);
      // Bytes are summed: a block of every rank, or of the whole with its copies of heads.
      CHECK(b->stats().capacity_bytes - b->stats().external_bytes ==
            int64_t(s.replicas()) * (a->stats().capacity_bytes - a->stats().external_bytes));
      CHECK(b->stats().prefix_hit_tokens == a->stats().prefix_hit_tokens);
    }
}

TEST_CASE("sharded memory: hand-over and adoption go through every rank", "[shards][allocator]") {
  const auto kv = make({"paged", KvOrder::layer_major}, shards(2, 3));
  std::vector<int32_t> tokens(17, 5);
  const KvHandle handle = kv->reserve(tokens, 0).value().handle;
  REQUIRE(kv->append(handle, 17));
  compute(*kv, handle, tokens, 0, 0);
  kv->written(handle, tokens);
  KvHandover travels = kv->handoff().hand_over(handle);
  const KvHandle arrived = kv->handoff().adopt(std::move(travels), tokens, 0);
  REQUIRE(arrived != kNoKv);
  CHECK(wrong(*kv, arrived, tokens, 0) == 0);
  kv->check_invariants(true);
  kv->handoff().discard(kv->handoff().hand_over(arrived));
  kv->check_invariants(true);
  CHECK(kv->stats().active + kv->stats().in_transfer == 0);
}

TEST_CASE("sharded memory: a pool on ranks has the bytes of its blocks, and no more", "[shards][allocator]") {
  const KvShards s = shards(2, 3);
  KvOptions o = options_of("paged", KvOrder::layer_major, s.n_ranks());
  o.pool_bytes += 7;
  const KvStats stats = make_ranked_memory("paged", o, s).value()->stats();
  const int64_t bytes = stats.capacity * 4 * int64_t(kWhole.token_bytes());
  CHECK(bytes == int64_t(o.pool_bytes) - 7);
  CHECK(stats.capacity_bytes == bytes);
  CHECK(stats.mapped_bytes == bytes);
  CHECK(stats.external_bytes == 0);
}

TEST_CASE("sharded memory: what cannot be is refused before anything is allocated", "[shards][allocator]") {
  auto message = [](const char* scheme, KvOptions o, const KvShards& s) {
    Result<PoolPlan> plan = plan_ranks(scheme, o, s);
    return plan ? std::string() : plan.error().message;
  };
  // Stages of 1 and 2 layers: a page group holds twice as many tokens of one as of the other.
  KvOptions o = options_of("vattention", KvOrder::token_major, 2);
  CHECK(message("vattention", o, shards(1, 2)).find("expected --kv-layout layer_major") != std::string::npos);
  CHECK(message("vattention", o, shards(1, 3)) == "");
  o = options_of("paged", KvOrder::layer_major, 4);
  o.pool_bytes = 4 * kWhole.token_bytes();  // one block, but not with its copies of heads
  CHECK(message("paged", o, shards(2, 1)) == "");
  CHECK(message("paged", o, shards(4, 1)).find("too small for 4 ranks: a block of 4 tokens needs") !=
        std::string::npos);
  o.pool_bytes = 10;
  CHECK(message("paged", o, shards(2, 1)).find("too small for one block") != std::string::npos);
}

}  // namespace
}  // namespace xpyd::testing::sharded_test
