#include "disagg/conductor/cluster_state.h"

#include <list>
#include <map>

#include "base/random.h"
#include "disagg/pool/directory.h"
#include "tests/catch.h"

namespace xpyd::testing::scoreboard_test {

class Told final : public InstanceProbe {
 public:
  explicit Told(bool versions) : versions_(versions) {}
  InstanceStats stats() const override { return stats_; }
  std::optional<int> matched_tokens(std::span<const int32_t>, uint64_t) const override { return {}; }
  const std::atomic<uint64_t>* version() const override { return versions_ ? &version_ : nullptr; }
  void did(int64_t steps, const StepCost::Terms& cost) {
    stats_.steps = steps;
    stats_.cost = cost;
    ++version_;
  }
  void change(Random& random) {
    stats_.kv = {.capacity = 100, .free = int(random.below(50)), .cached = int(random.below(50)), .block_tokens = 16};
    stats_.cost = {1e-3, 1e-5 * double(1 + random.below(9)), 1e-9, 1e-10, 1e-5, 1e-8};
    stats_.wire_s_per_byte = random.below(2) ? 1e-9 : 0;
    ++version_;
  }

 private:
  const bool versions_;
  InstanceStats stats_;
  std::atomic<uint64_t> version_{1};
};

void check_same(const ClusterView& a, const ClusterView& b) {
  REQUIRE(a.instances.size() == b.instances.size());
  for (size_t i = 0; i < a.instances.size(); ++i) {
    const InstanceView &x = a.instances[i], &y = b.instances[i];
    CHECK((x.role == y.role && x.queued == y.queued && x.queued_tokens == y.queued_tokens));
    CHECK((x.sequences == y.sequences && x.context_tokens == y.context_tokens));
    CHECK((x.available_tokens == y.available_tokens && x.indexed_tokens == y.indexed_tokens));
    CHECK(x.cached_tokens == y.cached_tokens);
    CHECK((x.queue_s == y.queue_s && x.prefill_s == y.prefill_s && x.step_s == y.step_s));
    CHECK((x.step_with_s == y.step_with_s && x.fetch_s == y.fetch_s && x.fetched_prefill_s == y.fetched_prefill_s));
  }
}

// A worker's cost before its first step was six times its twin's, so it never got a request.
TEST_CASE("scoreboard: an instance that has done nothing yet counts as fast as its like", "[scoreboard]") {
  Scoreboard board(512, StepCost());
  std::list<Member> members;
  for (int i = 0; i < 2; ++i) {
    Member& m = members.emplace_back();
    m.info = {.id = i, .role = Role::colocated, .capacity_blocks = 100, .block_tokens = 16, .max_batch = 8};
    m.probe = std::make_shared<Told>(true);
    board.joined(m);
  }
  const auto told = [&](int i) { return std::dynamic_pointer_cast<Told>(std::next(members.begin(), i)->probe); };
  const StepCost::Terms slow = {6e-3, 6e-5, 0, 0, 6e-5, 0}, fast = {1e-3, 1e-5, 0, 0, 1e-5, 0};
  told(0)->did(0, slow);
  told(1)->did(10, fast);
  std::vector<int32_t> tokens(500);
  const auto prefill_s = [&](size_t i) {
    PromptHashes prompt(tokens, 0);
    return board.look(prompt, 0).instances[i].prefill_s;
  };
  CHECK(prefill_s(0) == Approx(36e-3));  // neither has done much
  told(1)->did(100, fast);
  CHECK(prefill_s(1) == Approx(6e-3));
  told(0)->did(1, slow);
  CHECK(prefill_s(0) == Approx(6e-3));
  told(0)->did(32, slow);  // by now it has shown it
  CHECK(prefill_s(0) == Approx(36e-3));
}

// A conductor once said that a fetch saves -58 ns. The worker refused it, and the instance was lost.
TEST_CASE("scoreboard: the time that a fetch saves is never negative", "[scoreboard][fetch]") {
  const StepCost looks({1e-3, 0, 1e-3, 0, 0, 0});  // a chunk's cost depends on the tokens before it alone
  Scoreboard board(4096, looks);
  std::vector<int32_t> tokens(2000);
  for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = int32_t(t);
  std::list<Member> members;
  for (int i = 0; i < 2; ++i) {
    Member& m = members.emplace_back();
    m.info = {.id = i, .role = Role::prefill, .capacity_blocks = 1000, .block_tokens = 16, .max_batch = 8};
    m.info.layout.shape = {.n_layers = 2, .n_kv_heads = 1, .head_dim = 8};
    auto told = std::make_shared<Told>(true);
    told->did(1000, looks.terms());
    m.probe = told;
    board.joined(m);
  }
  board.heard(members.back(), CacheReport{.stored = prefix_hashes(tokens, 16, 0), .removed = {}});
  PromptHashes prompt(tokens, 0);
  board.look(prompt, 0);
  const Scoreboard::Fetch fetch = board.fetch(members.front(), prompt);
  REQUIRE(fetch.holder == 1);
  CHECK(fetch.view.holder_tokens > 1900);
  CHECK(fetch.view.saved_s == 0);
}

// Prompts are placed, begin and end, caches report, and instances leave and join. A scoreboard that keeps its rows
// agrees with one that has just met every instance.
TEST_CASE("scoreboard: kept rows equal rows that are computed anew", "[scoreboard]") {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Random random(seed);
    const StepCost prior;
    Scoreboard kept(512, prior, seed % 2 ? 1e-6 : 0);
    std::list<Member> members;
    std::vector<int32_t> tokens(2000);
    for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = int32_t(t);
    const std::vector<uint64_t> hashes = prefix_hashes(tokens, 16, 0);
    std::map<InstanceId, size_t> held;
    std::map<InstanceId, std::vector<PlacedPrompt>> queued, begun;
    double now = 0;
    InstanceId last = 0;
    for (int turn = 0; turn < 400; ++turn) {
      now += random.uniform() * 3;
      if (members.size() < 2 || (members.size() < 6 && random.below(10) == 0)) {
        Member& m = members.emplace_back();
        m.info = {
            .id = last++, .role = Role(random.below(3)), .capacity_blocks = 100, .block_tokens = 16, .max_batch = 8};
        m.info.layout.shape = {.n_layers = 2, .n_kv_heads = 1, .head_dim = 8};
        m.probe = std::make_shared<Told>(random.below(2));
        kept.joined(m);
      }
      Member& m = *std::next(members.begin(), long(random.below(members.size())));
      const InstanceId id = m.info.id;
      switch (random.below(8)) {
        case 0:
          queued[id].push_back(kept.prompt(1 + int(random.below(3000)), 0)), kept.placed(m, queued[id].back(), now);
          break;
        case 1:
          if (queued[id].empty()) break;
          begun[id].push_back(queued[id].back()), queued[id].pop_back();
          kept.begun(m, begun[id].back(), now);
          break;
        case 2:
          if (begun[id].empty()) break;
          kept.done(m, begun[id].back(), now), begun[id].pop_back();
          break;
        case 3: kept.decodes(m, 1, int64_t(random.below(3000))); break;
        case 4: std::dynamic_pointer_cast<Told>(m.probe)->change(random); break;
        case 5: kept.drain(m, random.below(3) == 0); break;
        case 6: {
          const size_t more = std::min(hashes.size(), held[id] + random.below(20));
          kept.heard(
              m, CacheReport{.stored = {hashes.begin() + long(held[id]), hashes.begin() + long(more)}, .removed = {}});
          held[id] = more;
          break;
        }
        default:
          if (random.below(4) != 0) break;
          kept.left(m);
          members.remove_if([id](const Member& other) { return other.info.id == id; });
          break;
      }
      std::list<Member> again = members;
      Scoreboard fresh(512, prior, seed % 2 ? 1e-6 : 0);
      std::vector<InstanceId> staying;
      for (Member& other : again) {
        const bool draining = std::exchange(other.draining, false);
        fresh.joined(other);
        fresh.drain(other, draining);
        fresh.heard(other,
                    CacheReport{.stored = {hashes.begin(), hashes.begin() + long(held[other.info.id])}, .removed = {}});
        if (!draining) staying.push_back(other.info.id);
      }
      PromptHashes one(tokens, 0), two(tokens, 0);
      const ClusterView seen = kept.look(one, now);
      check_same(seen, fresh.look(two, now));
      CHECK(std::ranges::equal(kept.ids(), staying));
    }
  }
}

TEST_CASE("directory: it agrees with a plain map of each instance's blocks, through removal and departures",
          "[disagg][directory]") {
  constexpr int kInstances = 40;
  Random random(7);
  CacheDirectory directory;
  std::vector<std::map<uint64_t, int>> plain(kInstances);  // hash -> bits of offload tiers
  for (int i = 0; i < kInstances; ++i) REQUIRE(directory.joined(1 << 20) == i);
  std::vector<uint64_t> hashes{0, ~uint64_t{0}};
  for (int i = 2; i < 6000; ++i) hashes.push_back(i % 2 ? random.next() : uint64_t(i / 16) << 50 | uint64_t(i));
  for (int round = 0; round < 60; ++round) {
    INFO("round " << round);
    for (int change = 0; change < 400; ++change) {
      const int instance = int(random.below(kInstances));
      auto& has = plain[size_t(instance)];
      CacheReport report{.tier = Tier(random.below(3)), .stored = {}, .removed = {}};
      for (int i = 0; i < 3; ++i)
        (random.below(5) < (round < 30 ? 4u : 1u) ? report.stored : report.removed)
            .push_back(hashes[random.below(hashes.size())]);
      for (uint64_t hash : report.removed)
        if (const auto at = has.find(hash); at != has.end() && (at->second &= ~(1 << int(report.tier))) == 0)
          has.erase(at);
      for (uint64_t hash : report.stored) has[hash] |= 1 << int(report.tier);
      directory.heard(instance, report);
    }
    if (round % 7 == 3) {
      const int gone = int(random.below(kInstances));
      directory.left(gone);
      plain[size_t(gone)].clear();
      REQUIRE(directory.joined(1 << 20) == gone);
    }
    for (int look = 0; look < 200; ++look) {
      const size_t at = random.below(hashes.size()), n = std::min(hashes.size() - at, 1 + random.below(12));
      const std::vector<uint64_t> prompt(hashes.begin() + long(at), hashes.begin() + long(at + n));
      const auto found = directory.find(prompt);
      for (size_t i = 0; i < plain.size(); ++i) {
        const auto longest = [&](int bits) {
          const auto lacks = [&](uint64_t hash) { return !plain[i].contains(hash) || !(plain[i].at(hash) & bits); };
          return int(std::ranges::find_if(prompt, lacks) - prompt.begin());
        };
        INFO("instance " << i);
        REQUIRE(found[i].device == longest(1));
        REQUIRE(found[i].host == longest(3));
        REQUIRE(found[i].all == longest(7));
      }
    }
    for (int i = 0; i < kInstances; ++i) REQUIRE(directory.blocks(i) == plain[size_t(i)].size());
  }
}

TEST_CASE("directory: an instance has no more blocks than its capacity", "[disagg][directory]") {
  CacheDirectory directory;
  const int one = directory.joined(10);
  CacheReport report;
  for (uint64_t hash = 1; hash < 100; ++hash) report.stored.push_back(hash);
  directory.heard(one, report);
  CHECK(directory.blocks(one) == 10);
  CHECK(directory.find(report.stored)[0].all == 10);
}

}  // namespace xpyd::testing::scoreboard_test
