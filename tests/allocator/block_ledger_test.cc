#include "allocator/block_ledger.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <deque>
#include <set>

#include "base/random.h"
#include "tests/allocator/shared_blocks.h"
#include "tests/catch.h"

namespace xpyd::testing::block_ledger_test {
namespace {

using As = BlockLedger::As;

TEST_CASE("BlockLedger: claims, shares, recycles, and gives back", "[allocator][ledger]") {
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
  CHECK_FALSE(b->share(block, generation, b->member()));      // whose it never was
  CHECK_FALSE(b->holds(block));
  CHECK(b->share(block, generation, a->member()));
  CHECK(b->share(block, generation, a->member()));  // once is enough
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

TEST_CASE("BlockLedger: as many members as it has bits, and a place again when one leaves", "[allocator][ledger]") {
  SharedBlocks blocks(4, 0);
  std::deque<std::unique_ptr<BlockLedger>> members;
  for (int i = 0; i < BlockLedger::kMembers; ++i) members.push_back(blocks.join());
  const auto one_more = blocks.try_join();
  REQUIRE_FALSE(one_more.ok());
  CHECK(one_more.error().code == ErrorCode::unavailable);
  members.pop_front();
  CHECK(blocks.try_join().ok());
}

// Of a process that ends the kernel closes one file after another, and the lock's may be closed
// long before those of a card, whose kernels may still write.
TEST_CASE("BlockLedger: who has lost its lock, or was stopped, and has not ended yet, keeps its blocks",
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
    if (closes) {  // a newcomer looks whether it has ended, for a second, and takes another place
      other = blocks.join();
      CHECK(other->member() == 1);
      CHECK(watch->count_free() == 11);
    }
    kill(pid, SIGKILL);
    siginfo_t info;
    REQUIRE(waitid(P_PID, id_t(pid), &info, WEXITED | WNOWAIT) == 0);  // ended, but not collected
    if (closes) CHECK(watch->reap() == 1);
    // Who runs short need not wait for anybody to reap.
    if (!other) other = blocks.join();
    std::vector<int32_t> held;
    CHECK(other->claim(16, held) == 16);
    CHECK(waitpid(pid, nullptr, 0) == pid);
  }
}

// What the processes of one test share beside the ledger.
struct Arena {
  static constexpr int kBlocks = 64, kOffers = 16;
  std::atomic<uint64_t> content[kBlocks];  // a hash of block and generation, by its claimer
  struct Offer {
    std::atomic<uint64_t> block_and_slot, generation, check;
  } offers[kOffers];
  std::atomic<uint64_t> steps, shares, refusals, wrong;
};

uint64_t content_of(int32_t block, uint32_t generation) {
  return (uint64_t(generation) << 8 | uint64_t(block) << 1 | 1) * 0x9e3779b97f4a7c15u;
}

// One process: holds a few blocks, checks what they contain, offers them, takes what others offer.
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
      default: {  // possibly made of two offers: then it is refused, or as good as true
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

TEST_CASE("BlockLedger: processes killed at any instruction lose no block, and none is held twice",
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
    if (random.below(2)) watch->reap();  // else whoever comes, or runs short
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

}  // namespace
}  // namespace xpyd::testing::block_ledger_test
