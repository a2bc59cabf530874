// The directory of who has which block, against a plain map.

#include "disagg/pool/directory.h"

#include <map>
#include <set>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::directory_test {
namespace {

TEST_CASE("directory: as a plain map of who has what, through growth, removal and departures", "[disagg][directory]") {
  constexpr int kInstances = 40;
  Random random(7);
  CacheDirectory directory;
  std::map<uint64_t, std::map<int, int>> plain;  // hash -> instance -> bits of tiers
  for (int i = 0; i < kInstances; ++i) REQUIRE(directory.joined(1 << 20) == i);
  // Hashes that fall on each other: some alone, some near the table's end, one that is 0.
  std::vector<uint64_t> hashes{0, ~uint64_t{0}};
  for (int i = 2; i < 6000; ++i) hashes.push_back(i % 2 ? random.next() : uint64_t(i / 16) << 50 | uint64_t(i));
  const auto check = [&](int round) {
    for (int look = 0; look < 200; ++look) {
      const size_t at = random.below(hashes.size()), n = 1 + random.below(12);
      std::vector<uint64_t> prompt;
      for (size_t i = at; i < std::min(hashes.size(), at + n); ++i) prompt.push_back(hashes[i]);
      const auto found = directory.find(prompt);
      for (int i = 0; i < kInstances; ++i) {
        CacheDirectory::Hit wanted;
        const auto longest = [&](int bits) {
          int blocks = 0;
          while (blocks < int(prompt.size()) && plain.contains(prompt[size_t(blocks)]) &&
                 plain[prompt[size_t(blocks)]].contains(i) && plain[prompt[size_t(blocks)]][i] & bits)
            ++blocks;
          return blocks;
        };
        INFO("round " << round << " instance " << i);
        REQUIRE(found[size_t(i)].device == longest(1));
        REQUIRE(found[size_t(i)].host == longest(3));
        REQUIRE(found[size_t(i)].all == longest(7));
      }
    }
    std::map<int, size_t> held;
    for (const auto& [hash, holders] : plain)
      for (const auto& [instance, tiers] : holders) ++held[instance];
    for (int i = 0; i < kInstances; ++i) REQUIRE(directory.blocks(i) == held[i]);
  };
  for (int round = 0; round < 60; ++round) {
    for (int change = 0; change < 400; ++change) {
      const int instance = int(random.below(kInstances));
      const auto tier = Tier(random.below(3));
      CacheReport report{.tier = tier, .stored = {}, .removed = {}};
      for (int i = 0; i < 3; ++i) {
        const size_t at = random.below(hashes.size());
        auto& holders = plain[hashes[at]];
        if (random.below(5) < (round < 30 ? 4u : 1u)) {
          report.stored.push_back(hashes[at]);
        } else {
          report.removed.push_back(hashes[at]);
        }
        if (holders.empty()) plain.erase(hashes[at]);
      }
      for (uint64_t hash : report.removed)
        if (const auto block = plain.find(hash); block != plain.end())
          if (const auto one = block->second.find(instance); one != block->second.end()) {
            one->second &= ~(1 << int(tier));
            if (one->second == 0) block->second.erase(one);
            if (block->second.empty()) plain.erase(block);
          }
      for (uint64_t hash : report.stored) plain[hash][instance] |= 1 << int(tier);
      directory.heard(instance, report);
    }
    if (round % 7 == 3) {
      const int gone = int(random.below(kInstances));
      directory.left(gone);
      for (auto block = plain.begin(); block != plain.end();) {
        block->second.erase(gone);
        block = block->second.empty() ? plain.erase(block) : std::next(block);
      }
      REQUIRE(directory.joined(1 << 20) == gone);
    }
    check(round);
  }
}

TEST_CASE("directory: nobody has more blocks than its capacity", "[disagg][directory]") {
  CacheDirectory directory;
  const int one = directory.joined(10);
  CacheReport report;
  for (uint64_t hash = 1; hash < 100; ++hash) report.stored.push_back(hash);
  directory.heard(one, report);
  CHECK(directory.blocks(one) == 10);
  CHECK(directory.find(report.stored)[0].all == 10);
  CHECK(directory.bytes() < 64 * 1024);
}

}  // namespace
}  // namespace xpyd::testing::directory_test
