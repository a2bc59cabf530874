// Two engines over one pool, with hand-overs, while others probe and read the stats.
#include <atomic>
#include <mutex>
#include <thread>

#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_stress_test {

namespace {

struct Parcel {
  KvHandover handover;
  std::vector<int32_t> tokens;
};

std::vector<int32_t> draw(Random& random) {
  std::vector<int32_t> tokens(1 + random.below(24));
  for (int32_t& t : tokens) t = int32_t(random.below(2));
  return tokens;
}

void two_engines_and_two_onlookers(bool radix) {
  KvOptions options = tiny_options(4, 48);
  options.radix = radix;
  auto pool = make_block_pool("paged", options).value();
  auto p = find_kv_scheme("paged")->make(pool, options);
  auto d = find_kv_scheme("paged")->make(pool, options);
  std::mutex mutex;
  std::vector<Parcel> mail;
  std::atomic<int> wrong{0}, sent{0}, received{0};
  std::atomic<bool> p_done{false}, done{false};
  constexpr int kRounds = 4000;

  std::thread prefill([&] {
    Random random(1);
    for (int i = 0; i < kRounds;) {
      std::vector<int32_t> tokens = draw(random);
      KvReservation r = p->reserve(tokens, 0).value();
      std::span<const int32_t> rest = std::span<const int32_t>(tokens).subspan(size_t(r.cached_tokens));
      if (!p->append(r.handle, int(rest.size()))) {
        p->free(r.handle);
        std::this_thread::yield();  // D gives blocks back
        continue;
      }
      ++i;
      write_rows(p->view(r.handle), tokens, 0, r.cached_tokens);
      p->written(r.handle, rest);
      wrong += wrong_rows(p->view(r.handle), tokens, 0);
      if (random.below(4) == 0) {
        p->free(r.handle);
      } else {
        KvHandle sibling = random.below(2) ? p->fork(r.handle).value() : kNoKv;
        KvHandover handover = p->handoff().hand_over(r.handle);
        ++sent;
        {
          std::lock_guard lock(mutex);
          mail.push_back({handover, tokens});
        }
        if (sibling != kNoKv) {  // writes its own tail while D writes the other
          int32_t token = 9;
          if (p->append(sibling, 1)) {
            tokens.push_back(token);
            write_rows(p->view(sibling), tokens, 0, int(tokens.size()) - 1);
            p->written(sibling, {&token, 1});
            wrong += wrong_rows(p->view(sibling), tokens, 0);
          }
          p->free(sibling);
        }
      }
      if (i % 64 == 0) p->check_invariants(false);
    }
    p_done = true;
  });
  std::thread decode([&] {
    Random random(2);
    while (true) {
      bool last = p_done;
      std::vector<Parcel> parcels;
      {
        std::lock_guard lock(mutex);
        parcels.swap(mail);
      }
      if (parcels.empty() && last) break;
      if (parcels.empty()) std::this_thread::yield();
      for (Parcel& parcel : parcels) {
        if (random.below(8) == 0) {
          d->handoff().discard(parcel.handover);
          ++received;
          continue;
        }
        KvHandle h = d->handoff().adopt(parcel.handover, parcel.tokens, 0);
        wrong += wrong_rows(d->view(h), parcel.tokens, 0);
        KvLease lease = d->pin(h);
        for (int step = 0; step < 5; ++step) {
          int32_t token = int32_t(random.below(2));
          if (!d->append(h, 1)) break;
          parcel.tokens.push_back(token);
          write_rows(d->view(h), parcel.tokens, 0, int(parcel.tokens.size()) - 1);
          d->written(h, {&token, 1});
        }
        wrong += wrong_rows(d->view(h), parcel.tokens, 0);
        d->free(h);
        d->unpin(lease);
        ++received;
      }
    }
  });
  std::atomic<int> bad_sums{0}, looks{0};
  std::thread onlooker([&] {
    Random random(3);
    while (!done) {
      KvStats s = p->stats();
      bad_sums += s.free + s.active + s.cached + s.in_transfer != s.capacity;
      std::vector<int32_t> tokens = draw(random);
      int hit = d->probe(tokens, random.below(2));
      bad_sums += (!radix && hit % 4 != 0) || hit >= int(tokens.size());
      if (random.below(256) == 0) p->clear_prefix_cache();
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
  CHECK(looks > 100);
  p->check_invariants(true);  // nothing is left with either
  d->check_invariants(true);
  CHECK(p->stats().active + p->stats().in_transfer == 0);
}

}  // namespace

TEST_CASE("BlockPool: two engines and two onlookers at once", "[allocator]") { two_engines_and_two_onlookers(false); }

TEST_CASE("BlockPool: two engines and two onlookers at once, radix", "[allocator][radix]") {
  two_engines_and_two_onlookers(true);
}

}  // namespace xpyd::testing::kv_stress_test
