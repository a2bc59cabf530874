// Pools of several "processes" over one ledger, each with its own metadata.
#include <deque>
#include <functional>

#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/allocator/shared_blocks.h"
#include "tests/catch.h"

namespace xpyd::testing::shared_pool_test {
namespace {

using Tokens = std::vector<int32_t>;

struct Member {
  Member(const SharedBlocks& blocks, const KvOptions& options, int n_sharing)
      : pool(blocks.pool(options, n_sharing)), kv(find_kv_scheme("paged")->make(pool, options)) {}
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<KvMemory> kv;
};

TEST_CASE("shared pool: a sequence goes from process to process, its blocks stay", "[allocator][ledger]") {
  const KvOptions options = tiny_options(4, 16);
  SharedBlocks blocks(16, options.pool_bytes);
  Member p(blocks, options, 2), d(blocks, options, 2);
  const Tokens prompt = counting(10, 0);
  const KvHandle source = fill(*p.kv, prompt, 0).handle;
  const KvHandover handover = p.kv->handoff().hand_over(source);
  REQUIRE(handover.between_processes());
  CHECK(p.kv->stats().in_transfer == 3);
  CHECK(d.kv->stats().elsewhere == 3);
  CHECK(d.kv->stats().capacity == 13);
  const KvHandle here = d.kv->handoff().adopt(handover, prompt, 0);
  REQUIRE(here != kNoKv);
  CHECK(wrong_rows(*d.kv, here, prompt, 0) == 0);
  CHECK(d.kv->stats().active == 3);
  p.kv->handoff().discard(handover);
  // Both have the full blocks, and may read them; the last one is the taker's.
  CHECK(p.kv->stats().cached == 2);
  CHECK(p.kv->stats().elsewhere == 1);
  CHECK(p.kv->probe(prompt, 0) == 8);
  const Tokens more = counting(11, 0);
  extend(*d.kv, here, more, 0);
  const KvHandle again = fill(*p.kv, prompt, 0).handle;  // a hit of two blocks, one computed
  CHECK(wrong_rows(*p.kv, again, prompt, 0) == 0);
  CHECK(wrong_rows(*d.kv, here, more, 0) == 0);
  p.kv->free(again);
  p.kv->clear_prefix_cache();
  CHECK(p.kv->stats().capacity == 13);
  CHECK(wrong_rows(*d.kv, here, more, 0) == 0);
  d.kv->free(here);
  d.kv->clear_prefix_cache();
  CHECK(p.kv->stats().free == 16);
  p.kv->check_invariants(true);
  d.kv->check_invariants(true);
}

TEST_CASE("shared pool: what the giver does not hold any more is refused", "[allocator][ledger]") {
  const KvOptions options = tiny_options(4, 8);
  SharedBlocks blocks(8, options.pool_bytes);
  Member p(blocks, options, 2), d(blocks, options, 2);
  const Tokens prompt = counting(10, 0);
  const KvHandover late = p.kv->handoff().hand_over(fill(*p.kv, prompt, 0).handle);
  p.kv->handoff().discard(late);  // the last block is free now, the others are cached
  CHECK(d.kv->handoff().adopt(late, prompt, 0) == kNoKv);
  CHECK(d.kv->stats().active + d.kv->stats().cached == 0);
  // The same blocks with another content.
  const Tokens other = counting(30, 100);
  const KvHandle taken = fill(*p.kv, other, 0).handle;
  CHECK(d.kv->handoff().adopt(late, prompt, 0) == kNoKv);
  const KvHandover good = p.kv->handoff().hand_over(taken);
  const std::function<void(KvHandover&)> changes[] = {
      [](auto& h) { h.generations.pop_back(); },
      [](auto& h) { h.blocks.pop_back(); },
      [](auto& h) { h.generations.back() += 1; },
      [](auto& h) { h.blocks.back() = -1; },
      [](auto& h) { h.blocks[0] = 8; },
      [](auto& h) { h.tokens = -3; },
      [](auto& h) { h.tokens = 3; },
      [](auto& h) { h.giver = -1; },
      [](auto& h) { h.giver = 32; },
      [&](auto& h) { h.giver = d.pool->source().member(); },
  };
  for (const auto& change : changes) {
    KvHandover bad = good;
    change(bad);
    CHECK(d.kv->handoff().adopt(bad, other, 0) == kNoKv);
    d.kv->check_invariants(true);
  }
  CHECK(d.kv->stats().active + d.kv->stats().cached == 0);
  CHECK(d.kv->handoff().adopt(good, other, 0) != kNoKv);
  p.kv->handoff().discard(good);
  p.kv->check_invariants(true);
  d.kv->check_invariants(true);
}

TEST_CASE("shared pool: cached blocks beyond a process's share leave the others room", "[allocator][ledger]") {
  const KvOptions options = tiny_options(4, 16);
  SharedBlocks blocks(16, options.pool_bytes);
  Member a(blocks, options, 2), b(blocks, options, 2);
  for (int i = 0; i < 4; ++i) a.kv->free(fill(*a.kv, counting(16, 100 * i), 0).handle);
  CHECK(a.kv->stats().cached == 8);  // its share, of the last ones
  CHECK(a.kv->probe(counting(17, 300), 0) == 16);
  CHECK(a.kv->probe(counting(17, 0), 0) == 0);
  const KvHandle whole = fill(*b.kv, counting(32, 0), 0).handle;  // all of b's share
  CHECK(b.kv->reserve(counting(1, 0), 0).ok());
  CHECK(b.kv->stats().free == 0);
  const KvHandle none = b.kv->reserve(counting(1, 7), 0).value().handle;
  CHECK_FALSE(b.kv->append(none, 1));
  // What nobody else wants, one may have all of: its own cached ones go first.
  b.kv->free(whole);
  b.kv->clear_prefix_cache();
  const KvHandle all = fill(*a.kv, counting(64, 1000), 0).handle;
  CHECK(a.kv->stats().active == 16);
  CHECK(a.kv->stats().cached == 0);
  a.kv->free(all);
  CHECK(a.kv->stats().cached == 8);
  a.kv->check_invariants(true);
}

TEST_CASE("shared pool: random operations of three processes, one of which dies now and then", "[allocator][ledger]") {
  constexpr int kBlocks = 40;
  int adopted = 0, refused = 0;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const KvOptions options = tiny_options(4, kBlocks);
    SharedBlocks blocks(kBlocks, options.pool_bytes);
    auto watch = blocks.join(BlockLedger::As::observer);
    Random random(seed);
    struct Live {
      KvHandle handle;
      Tokens tokens;
    };
    struct Process {
      std::unique_ptr<Member> member;
      std::vector<Live> live;
      std::vector<std::pair<KvHandover, Tokens>> given;  // not discarded yet
    };
    Process processes[3];
    for (Process& p : processes) p.member = std::make_unique<Member>(blocks, options, 3);
    std::deque<std::pair<KvHandover, Tokens>> mail;
    for (int step = 0; step < 400; ++step) {
      INFO("seed " << seed << " step " << step);
      Process& p = processes[random.below(3)];
      KvMemory& kv = *p.member->kv;
      const size_t which = p.live.empty() ? 0 : random.below(uint32_t(p.live.size()));
      switch (random.below(12)) {
        case 0:
        case 1:
        case 2: {  // a prompt, of few, so that prefixes hit
          Tokens tokens = counting(1 + int(random.below(20)), int(random.below(3)));
          const KvHandle handle = kv.reserve(tokens, 0).value().handle;
          if (kv.append(handle, int(tokens.size()) - kv.written_tokens(handle))) {
            extend(kv, handle, tokens, 0);
            p.live.push_back({handle, tokens});
          } else {
            kv.free(handle);
          }
          break;
        }
        case 3:
        case 4: {  // one token more
          if (p.live.empty() || !kv.append(p.live[which].handle, 1)) break;
          p.live[which].tokens.push_back(int32_t(random.below(3)));
          extend(kv, p.live[which].handle, p.live[which].tokens, 0);
          break;
        }
        case 5:
        case 6: {
          if (p.live.empty() || kv.tail_shared(p.live[which].handle)) break;
          KvHandover handover = kv.handoff().hand_over(p.live[which].handle);
          mail.push_back({handover, p.live[which].tokens});
          p.given.push_back(mail.back());
          p.live.erase(p.live.begin() + long(which));
          break;
        }
        case 7:
        case 8: {  // possibly late, possibly of one that is dead
          if (mail.empty() || mail.front().first.giver == p.member->pool->source().member()) break;
          auto [handover, tokens] = mail.front();
          mail.pop_front();
          const KvHandle handle = kv.handoff().adopt(handover, tokens, 0);
          (handle == kNoKv ? refused : adopted)++;
          if (handle != kNoKv) p.live.push_back({handle, tokens});
          break;
        }
        case 9:  // acknowledged, or given up
          if (p.given.empty()) break;
          kv.handoff().discard(p.given.front().first);
          p.given.erase(p.given.begin());
          break;
        case 10:
          if (p.live.empty()) break;
          kv.free(p.live[which].handle);
          p.live.erase(p.live.begin() + long(which));
          break;
        default:
          if (random.below(12) != 0) break;
          p = Process{std::make_unique<Member>(blocks, options, 3), {}, {}};
      }
      for (Process& each : processes) {
        each.member->kv->check_invariants(each.given.empty());
        for (const Live& one : each.live) REQUIRE(wrong_rows(each.member->kv->view(one.handle), one.tokens, 0) == 0);
      }
      const KvStats s = processes[0].member->kv->stats();
      REQUIRE(s.free == watch->count_free());
      REQUIRE(s.free + s.cached + s.active + s.in_transfer == s.capacity);
      REQUIRE(s.capacity + s.elsewhere == kBlocks);
    }
    for (Process& p : processes) p = {};
    CHECK(watch->count_free() == kBlocks);
  }
  CHECK(adopted > 100);
  CHECK(refused > 20);
}

}  // namespace
}  // namespace xpyd::testing::shared_pool_test
