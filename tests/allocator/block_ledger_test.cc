// Tests a ledger of blocks that processes share, and pools of several "processes" over one ledger, each with its own
// metadata.
#include "allocator/pool/block_ledger.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <deque>
#include <functional>
#include <set>

#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/allocator/shared_blocks.h"
#include "tests/catch.h"

namespace xpyd::testing::block_ledger_test {
namespace {

using As = BlockLedger::As;

TEST_CASE("BlockLedger: members claim, share, recycle and give back blocks", "[allocator][ledger]") {
  SharedBlocks blocks(100, 0);
  auto a = blocks.join(), b = blocks.join();
  auto watch = blocks.join(As::observer);
  CHECK(a->member() != b->member());
  CHECK(watch->count_free() == 100);
  std::vector<int32_t> of_a, of_b;
  CHECK(a->claim(60, of_a) == 60);
  const uint64_t before = watch->changes();
  CHECK(b->claim(60, of_b) == 40);
  CHECK(watch->changes() != before);
  CHECK(b->claim(1, of_b) == 0);
  std::set<int32_t> all(of_a.begin(), of_a.end());
  all.insert(of_b.begin(), of_b.end());
  CHECK(all.size() == 100);
  const int32_t block = of_a[7];
  const uint32_t generation = a->generation(block);
  CHECK(generation == 1);
  CHECK_FALSE(b->share(block, generation + 1, a->member()));  // another content
  CHECK_FALSE(b->share(block, generation, b->member()));      // b never held it
  CHECK_FALSE(b->holds(block));
  CHECK(b->share(block, generation, a->member()));
  CHECK(b->share(block, generation, a->member()));  // a second share adds nothing
  CHECK(b->holds(block));
  CHECK_FALSE(a->recycle(block));  // b reads it
  CHECK_FALSE(a->holds(block));
  CHECK(b->recycle(block));
  CHECK(b->generation(block) == generation + 1);
  b->release(block);
  CHECK(watch->count_free() == 1);
  CHECK_FALSE(b->share(block, generation + 1, a->member()));
  of_a.clear();
  CHECK(a->claim(1, of_a) == 1);
  CHECK(a->generation(block) == generation + 2);
  a.reset();
  CHECK(watch->count_free() == 60);
  b.reset();
  CHECK(watch->count_free() == 100);
}

TEST_CASE("BlockLedger: it takes as many members as it has bits, and reuses the place of one that leaves",
          "[allocator][ledger]") {
  SharedBlocks blocks(4, 0);
  std::deque<std::unique_ptr<BlockLedger>> members;
  for (int i = 0; i < BlockLedger::kMembers; ++i) members.push_back(blocks.join());
  const auto one_more = blocks.try_join();
  REQUIRE_FALSE(one_more.ok());
  CHECK(one_more.error().code == ErrorCode::unavailable);
  members.pop_front();
  CHECK(blocks.try_join().ok());
}

// When a process ends, the kernel closes its files one after another. The lock's file may be closed long before those
// of the GPU, whose kernels may still write.
TEST_CASE("BlockLedger: a process without its lock, or a stopped one, keeps its blocks until it has ended",
          "[allocator][ledger]") {
  for (const bool closes : {true, false}) {
    CAPTURE(closes);
    SharedBlocks blocks(16, sizeof(std::atomic<int>));
    auto& ready = *reinterpret_cast<std::atomic<int>*>(blocks.data());
    auto watch = blocks.join(As::observer);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      auto member = blocks.join();
      std::vector<int32_t> got;
      member->claim(5, got);
      if (closes && close_range(3, ~0u, 0) != 0) _exit(1);
      ready = 1;
      for (;;) pause();
    }
    int status = 0;
    while (ready == 0 && waitpid(pid, &status, WNOHANG) != pid) sched_yield();
    REQUIRE(ready == 1);
    CHECK(watch->reap() == 0);
    kill(pid, SIGSTOP);
    REQUIRE((waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status)));
    CHECK(watch->reap() == 0);
    CHECK(watch->count_free() == 11);
    std::unique_ptr<BlockLedger> other;
    if (closes) {  // a newcomer waits a second for it to end, then takes another place
      other = blocks.join();
      CHECK(other->member() == 1);
      CHECK(watch->count_free() == 11);
    }
    kill(pid, SIGKILL);
    siginfo_t info;
    REQUIRE(waitid(P_PID, id_t(pid), &info, WEXITED | WNOWAIT) == 0);  // ended, but not collected
    if (closes) CHECK(watch->reap() == 1);
    // A member that runs out of blocks need not wait for a reap().
    if (!other) other = blocks.join();
    std::vector<int32_t> held;
    CHECK(other->claim(16, held) == 16);
    CHECK(waitpid(pid, nullptr, 0) == pid);
  }
}

// State that the processes of one test share beside the ledger.
struct Arena {
  static constexpr int kBlocks = 64, kOffers = 16;
  std::atomic<uint64_t> content[kBlocks];  // a hash of block and generation, written by its claimer
  struct Offer {
    std::atomic<uint64_t> block_and_slot, generation, check;
  } offers[kOffers];
  std::atomic<uint64_t> steps, shares, refusals, wrong;
};

uint64_t content_of(int32_t block, uint32_t generation) {
  return (uint64_t(generation) << 8 | uint64_t(block) << 1 | 1) * 0x9e3779b97f4a7c15u;
}

// One process: holds a few blocks, checks their contents, offers them, and takes what others offer.
[[noreturn]] void live(const SharedBlocks& blocks, uint64_t seed) {
  Arena& arena = *reinterpret_cast<Arena*>(blocks.data());
  auto ledger = blocks.join();
  Random random(seed);
  struct Held {
    int32_t block;
    uint32_t generation;
  };
  std::vector<Held> held;
  auto look = [&](const Held& h) {
    if (arena.content[h.block] != content_of(h.block, h.generation) || ledger->generation(h.block) != h.generation ||
        !ledger->holds(h.block))
      ++arena.wrong;
  };
  auto fill = [&](int32_t block) {
    const Held h{block, ledger->generation(block)};
    arena.content[block] = content_of(block, h.generation);
    held.push_back(h);
  };
  for (;;) {
    ++arena.steps;
    const size_t which = held.empty() ? 0 : random.below(uint32_t(held.size()));
    switch (random.below(6)) {
      case 0:
      case 1: {
        std::vector<int32_t> got;
        ledger->claim(1 + int(random.below(6)), got);
        for (int32_t block : got) fill(block);
        break;
      }
      case 2:
        if (held.empty()) break;
        look(held[which]);
        ledger->release(held[which].block);
        held.erase(held.begin() + long(which));
        break;
      case 3:
        if (held.empty()) break;
        look(held[which]);
        if (const int32_t block = held[which].block; true) {
          held.erase(held.begin() + long(which));
          if (ledger->recycle(block)) fill(block);
        }
        break;
      case 4: {
        if (held.empty()) break;
        Arena::Offer& offer = arena.offers[random.below(Arena::kOffers)];
        const uint64_t what = uint64_t(held[which].block) << 8 | uint64_t(ledger->member());
        offer.block_and_slot = what;
        offer.generation = held[which].generation;
        offer.check = content_of(int32_t(what), held[which].generation);
        break;
      }
      default: {  // possibly a mix of two offers: refused, or as good as a true one
        Arena::Offer& offer = arena.offers[random.below(Arena::kOffers)];
        const uint64_t what = offer.block_and_slot;
        const Held h{int32_t(what >> 8), uint32_t(offer.generation)};
        if (offer.check != content_of(int32_t(what), h.generation) || h.generation == 0) break;
        if (ledger->holds(h.block)) break;
        if (ledger->share(h.block, h.generation, int(what & 0xff))) {
          ++arena.shares;
          look(h);
          held.push_back(h);
        } else {
          ++arena.refusals;
        }
      }
    }
    if (held.size() > 24) {
      ledger->release(held.back().block);
      held.pop_back();
    }
  }
}

TEST_CASE("BlockLedger: processes killed at any instruction lose no block, and no block is held twice",
          "[allocator][ledger]") {
  SharedBlocks blocks(Arena::kBlocks, sizeof(Arena));
  Arena& arena = *new (blocks.data()) Arena();
  auto watch = blocks.join(As::observer);
  Random random(1);
  pid_t children[3];
  uint64_t seed = 0;
  auto start = [&] {
    const pid_t pid = fork();
    if (pid == 0) live(blocks, ++seed * 977 + uint64_t(getpid()));
    ++seed;
    return pid;
  };
  auto end = [](pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  };
  for (pid_t& pid : children) pid = start();
  for (int round = 0; round < 100; ++round) {
    for (const uint64_t until = arena.steps + random.below(5000); arena.steps < until;) sched_yield();
    pid_t& victim = children[random.below(3)];
    end(victim);
    if (random.below(2)) watch->reap();  // else a newcomer or a process that runs out of blocks does it
    victim = start();
  }
  for (pid_t pid : children) end(pid);
  CHECK(watch->reap() >= 1);
  CHECK(watch->reap() == 0);
  CHECK(watch->count_free() == Arena::kBlocks);
  CHECK(arena.wrong == 0);
  CHECK(arena.shares > 0);
  CHECK(arena.refusals > 0);
}

using Tokens = std::vector<int32_t>;

struct Member {
  Member(const SharedBlocks& blocks, const KvOptions& options, int n_sharing)
      : pool(blocks.pool(options, n_sharing)), kv(find_kv_scheme("paged")->make(pool, options)) {}
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<KvMemory> kv;
};

TEST_CASE("shared pool: a sequence moves from process to process while its blocks stay in place",
          "[allocator][ledger]") {
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
  // Both processes hold the full blocks and may read them. The last block belongs to the taker alone.
  CHECK(p.kv->stats().cached == 2);
  CHECK(p.kv->stats().elsewhere == 1);
  CHECK(p.kv->probe(prompt, 0) == 8);
  const Tokens more = counting(11, 0);
  extend(*d.kv, here, more, 0);
  const KvHandle again = fill(*p.kv, prompt, 0).handle;  // a hit of two blocks, and one block computed
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

TEST_CASE("shared pool: a handover whose giver no longer holds the blocks is refused", "[allocator][ledger]") {
  const KvOptions options = tiny_options(4, 8);
  SharedBlocks blocks(8, options.pool_bytes);
  Member p(blocks, options, 2), d(blocks, options, 2);
  const Tokens prompt = counting(10, 0);
  const KvHandover late = p.kv->handoff().hand_over(fill(*p.kv, prompt, 0).handle);
  p.kv->handoff().discard(late);  // the last block is free now, the others are cached
  CHECK(d.kv->handoff().adopt(late, prompt, 0) == kNoKv);
  CHECK(d.kv->stats().active + d.kv->stats().cached == 0);
  // The same blocks now have another content.
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

TEST_CASE("shared pool: cached blocks beyond a process's share give way to other processes", "[allocator][ledger]") {
  const KvOptions options = tiny_options(4, 16);
  SharedBlocks blocks(16, options.pool_bytes);
  Member a(blocks, options, 2), b(blocks, options, 2);
  for (int i = 0; i < 4; ++i) a.kv->free(fill(*a.kv, counting(16, 100 * i), 0).handle);
  CHECK(a.kv->stats().cached == 8);  // its share: the most recent ones
  CHECK(a.kv->probe(counting(17, 300), 0) == 16);
  CHECK(a.kv->probe(counting(17, 0), 0) == 0);
  const KvHandle whole = fill(*b.kv, counting(32, 0), 0).handle;  // all of b's share
  CHECK(b.kv->reserve(counting(1, 0), 0).ok());
  CHECK(b.kv->stats().free == 0);
  const KvHandle none = b.kv->reserve(counting(1, 7), 0).value().handle;
  CHECK_FALSE(b.kv->append(none, 1));
  // A process may take all blocks that no other wants. Its own cached blocks go first.
  b.kv->free(whole);
  b.kv->clear_prefix_cache();
  const KvHandle all = fill(*a.kv, counting(64, 1000), 0).handle;
  CHECK(a.kv->stats().active == 16);
  CHECK(a.kv->stats().cached == 0);
  a.kv->free(all);
  CHECK(a.kv->stats().cached == 8);
  a.kv->check_invariants(true);
}

TEST_CASE("shared pool: invariants hold under random operations of three processes that sometimes die",
          "[allocator][ledger]") {
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
        case 2: {  // from few prompts, so that prefixes hit
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
        case 8: {  // possibly late, or from a dead process
          if (mail.empty() || mail.front().first.giver == p.member->pool->source().member()) break;
          auto [handover, tokens] = mail.front();
          mail.pop_front();
          const KvHandle handle = kv.handoff().adopt(handover, tokens, 0);
          (handle == kNoKv ? refused : adopted)++;
          if (handle != kNoKv) p.live.push_back({handle, tokens});
          break;
        }
        case 9:  // acknowledged or abandoned
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
}  // namespace xpyd::testing::block_ledger_test
