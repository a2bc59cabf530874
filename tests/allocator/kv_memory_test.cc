// Hand-written cases of block memories, beside their random operations (kv_memory_random_test.cc).
#include "allocator/kv_memory.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "allocator/schemes.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_memory_test {

// In the tests of every room an unwritten row that is read gives NaN, in a release build, too.
[[maybe_unused]] const bool kPoison = BlockPool::poison_by_default = true;

TEST_CASE("paged: rows of a new block are NaN until they are written", "[allocator]") {
  Memory m(tiny_options(4, 8));
  const KvHandle fresh = m.kv->reserve(counting(4), 0).value().handle;
  REQUIRE(m.kv->append(fresh, 4));
  for (int t = 0; t < 4; ++t) CHECK(std::isnan(*reinterpret_cast<const float*>(m.kv->view(fresh).row(1, 1, t, 1))));
}

TEST_CASE("paged: a hit covers full blocks of equal prefix and never the last token", "[allocator]") {
  Memory m(tiny_options(4, 32));
  const std::vector<int32_t> prompt = counting(12);
  const KvReservation first = fill(*m.kv, prompt, 0);
  CHECK(first.cached_tokens == 0);
  // 12 tokens are three full blocks. The last token must be computed, so two blocks are hit.
  for (auto [tokens, hit] : {std::pair{12, 8}, {13, 12}, {11, 8}, {8, 4}, {5, 4}, {4, 0}, {1, 0}, {0, 0}}) {
    CHECK(m.kv->probe(counting(tokens), 0) == hit);
    CHECK(m.kv->probe(counting(tokens), 7) == 0);
  }
  std::vector<int32_t> other = prompt;
  other[5] = -1;
  CHECK(m.kv->probe(other, 0) == 4);

  const KvReservation second = m.kv->reserve(prompt, 0).value();
  CHECK(second.cached_tokens == 8);
  CHECK(std::ranges::equal(m.kv->blocks(second.handle), m.kv->blocks(first.handle).first(2)));
  const KvStats stats = m.kv->stats();
  CHECK((stats.prefix_query_tokens == 24 && stats.prefix_hit_tokens == 8 && stats.active == 3));
  m.kv->check_invariants();
}

TEST_CASE("paged: the least recently used tail is evicted first", "[allocator]") {
  Memory m(tiny_options(4, 8));
  const std::vector<int32_t> a = counting(17, 0), b = counting(13, 1000);  // 4 + 1 and 3 + 1 blocks
  auto run = [&](const std::vector<int32_t>& tokens) { m.kv->free(fill(*m.kv, tokens, 0).handle); };
  run(a);
  run(b);
  CHECK(m.kv->stats().cached == 7);
  CHECK(m.kv->stats().free == 1);  // partial blocks are not kept
  run(a);                          // a is used again, so b is older now
  CHECK(m.kv->stats().evictions == 0);
  // One block is free. Two more come from b's tail, before its head and before a.
  const KvReservation c = fill(*m.kv, counting(12, 5000), 0);
  CHECK(m.kv->stats().evictions == 2);
  CHECK(m.kv->probe(a, 0) == 16);
  CHECK(m.kv->probe(b, 0) == 4);
  // probe() does not count as use: b's head goes next although it was just looked up.
  CHECK(m.kv->append(c.handle, 1));
  CHECK(m.kv->probe(b, 0) == 0);
  CHECK(m.kv->probe(a, 0) == 16);
  CHECK(m.kv->append(c.handle, 16));  // and then a, from its tail
  CHECK(m.kv->probe(a, 0) == 4);
  m.kv->check_invariants();
}

TEST_CASE("KvMemory: blocks of a destroyed memory return to the shared pool", "[allocator]") {
  Memory m(tiny_options(4, 10));
  {
    auto other = find_kv_scheme("paged")->make(m.pool, m.options);
    other->pin(fill(*other, counting(5), 0).handle);
    CHECK(m.kv->stats().in_transfer == 2);
  }
  CHECK((m.kv->stats().in_transfer == 0 && m.kv->stats().cached == 1));
  m.kv->check_invariants();
}

// Two engines share a pool and hand over sequences, while other threads probe and read the stats.
TEST_CASE("BlockPool: two engines and two readers work at once", "[allocator][radix]") {
  struct Parcel {
    KvHandover handover;
    std::vector<int32_t> tokens;
  };
  const auto draw = [](Random& random) {
    std::vector<int32_t> tokens(1 + random.below(24));
    for (int32_t& t : tokens) t = int32_t(random.below(2));
    return tokens;
  };
  for (const bool radix : {false, true}) {
    CAPTURE(radix);
    KvOptions options = tiny_options(4, 48);
    options.radix = radix;
    Memory p(options);
    const auto d = find_kv_scheme("paged")->make(p.pool, options);
    std::mutex mutex;
    std::vector<Parcel> mail;
    std::atomic<int> wrong{0}, sent{0}, received{0}, bad_sums{0}, looks{0};
    std::atomic<bool> p_done{false}, done{false};
    constexpr int kRounds = 4000;
    std::thread prefill([&] {
      Random random(1);
      for (int i = 0; i < kRounds;) {
        std::vector<int32_t> tokens = draw(random);
        const KvReservation r = p.kv->reserve(tokens, 0).value();
        if (!p.kv->append(r.handle, int(tokens.size()) - r.cached_tokens)) {
          p.kv->free(r.handle);
          std::this_thread::yield();  // D frees blocks
          continue;
        }
        ++i;
        extend(*p.kv, r.handle, tokens, 0);
        wrong += wrong_rows(*p.kv, r.handle, tokens, 0);
        if (random.below(4) == 0) {
          p.kv->free(r.handle);
        } else {
          const KvHandover handover = p.kv->handoff().hand_over(r.handle);
          ++sent;
          std::lock_guard lock(mutex);
          mail.push_back({handover, tokens});
        }
        if (i % 64 == 0) p.kv->check_invariants(false);
      }
      p_done = true;
    });
    std::thread decode([&] {
      Random random(2);
      for (;;) {
        const bool last = p_done;
        std::vector<Parcel> parcels;
        {
          std::lock_guard lock(mutex);
          parcels.swap(mail);
        }
        if (parcels.empty() && last) break;
        if (parcels.empty()) std::this_thread::yield();
        for (Parcel& parcel : parcels) {
          ++received;
          if (random.below(8) == 0) {
            d->handoff().discard(parcel.handover);
            continue;
          }
          const KvHandle h = d->handoff().adopt(parcel.handover, parcel.tokens, 0);
          wrong += wrong_rows(*d, h, parcel.tokens, 0);
          for (int step = 0; step < 5 && d->append(h, 1); ++step) {
            parcel.tokens.push_back(int32_t(random.below(2)));
            write_rows(d->view(h), parcel.tokens, 0, int(parcel.tokens.size()) - 1);
            d->commit(h, std::span(parcel.tokens).last(1));
          }
          wrong += wrong_rows(*d, h, parcel.tokens, 0);
          d->free(h);
        }
      }
    });
    std::thread onlooker([&] {
      Random random(3);
      while (!done || looks < 100) {
        const KvStats s = p.kv->stats();
        bad_sums += s.free + s.active + s.cached + s.in_transfer != s.capacity;
        const std::vector<int32_t> tokens = draw(random);
        const int hit = d->probe(tokens, random.below(2));
        bad_sums += (!radix && hit % 4 != 0) || hit >= int(tokens.size());
        if (random.below(256) == 0) p.kv->clear_prefix_cache();
        ++looks;
      }
    });
    prefill.join();
    decode.join();
    done = true;
    onlooker.join();
    CHECK(wrong == 0);
    CHECK(bad_sums == 0);
    CHECK(sent == received);
    CHECK(sent > kRounds / 2);
    p.kv->check_invariants(true);  // no sequence is left with either
    d->check_invariants(true);
    CHECK(p.kv->stats().active + p.kv->stats().in_transfer == 0);
  }
}

}  // namespace xpyd::testing::kv_memory_test
