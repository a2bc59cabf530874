// The shm wire beside the suite (transport_test.cc): room for the ranges of windows.

#include <algorithm>

#include "base/random.h"
#include "disagg/transport/shared_memory.h"
#include "disagg/transport/shm_owner.h"
#include "tests/catch.h"

namespace xpyd::testing::shm_test {
namespace {

using namespace shm;

TEST_CASE("shm: room for ranges, against a list of who has what", "[shm]") {
  constexpr uint32_t kRoom = 300;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    RangeRoom room(kRoom);
    std::vector<int> owner(kRoom, 0);
    struct Taken {
      uint32_t first, n;
    };
    std::vector<Taken> taken;
    for (int step = 1; step <= 2000; ++step) {
      if (taken.empty() || random.below(2)) {
        const auto n = uint32_t(1 + random.below(40));
        const auto first = room.take(n);
        const std::vector<int> wanted(n, 0);
        const auto fits = std::search(owner.begin(), owner.end(), wanted.begin(), wanted.end());
        REQUIRE(first.has_value() == (fits != owner.end()));
        if (!first) continue;
        REQUIRE(*first == uint32_t(fits - owner.begin()));
        std::fill_n(fits, n, step);
        taken.push_back({*first, n});
      } else {
        std::swap(taken[random.below(taken.size())], taken.back());
        room.give(taken.back().first, taken.back().n);
        std::fill_n(owner.begin() + taken.back().first, taken.back().n, 0);
        taken.pop_back();
      }
    }
    for (const Taken& one : taken) room.give(one.first, one.n);
    CHECK(room.take(kRoom) == 0u);
    CHECK(!room.take(1));
  }
}

TEST_CASE("shm: more ranges than there is room for are an error, until a window closes", "[shm]") {
  constexpr size_t kBytes = 4 << 20;
  auto memory = shared_pool_memory(kBytes).value();
  RealClock clock;
  auto made = Owner::make({.regions = {{memory.get(), kBytes}}, .clock = &clock});
  REQUIRE(made);
  Owner& owner = *made.value();
  owner.connect(1);
  std::vector<MemoryRange> ranges;  // every second 32 bytes: none joins its neighbour
  for (size_t at = 0; at + 64 <= kBytes; at += 64) ranges.push_back({memory.get() + at, 32});
  std::vector<WindowKey> open;
  while (true) {
    auto key = owner.open(1, KvOp::write, ranges);
    if (!key) {
      CHECK(key.error().code == ErrorCode::unavailable);
      break;
    }
    open.push_back(key.value());
    REQUIRE(open.size() < 100);
  }
  REQUIRE(open.size() >= 2);
  CHECK(owner.close(open[0]));
  CHECK(owner.open(1, KvOp::write, ranges));
}

}  // namespace
}  // namespace xpyd::testing::shm_test
