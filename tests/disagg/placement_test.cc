#include "disagg/placement.h"

#include <set>

#include "base/random.h"
#include "disagg/cluster.h"
#include "tests/catch.h"

namespace xpyd::testing::placement_test {
namespace {

Placement place(const char* policy, const std::vector<InstanceView>& instances, uint64_t random = 0) {
  return find_placement_policy(policy)->place({.instances = instances, .prompt_tokens = 100, .random = random}, {});
}

TEST_CASE("topologies parse, and wrong ones say what is expected", "[disagg]") {
  CHECK(parse_topology("1C").value() == std::vector{Role::colocated});
  CHECK(parse_topology("2P1D").value() == std::vector{Role::prefill, Role::prefill, Role::decode});
  CHECK(parse_topology("1P1D2C").value().size() == 4);
  CHECK(parse_topology("2C1P1D").value()[0] == Role::colocated);
  for (const char* bad : {"", "P", "1P", "1D", "0C", "1X", "1P1D1", "1C1C", "-1C", "99999C", "1p1d", "65C"}) {
    INFO(bad);
    Result<std::vector<Role>> roles = parse_topology(bad);
    REQUIRE_FALSE(roles.ok());
    CHECK(roles.error().message.find("expected a form like") != std::string::npos);
  }
}

TEST_CASE("random reaches every pair and only eligible ones", "[disagg]") {
  std::vector<InstanceView> instances(5);
  instances[1].role = instances[2].role = Role::prefill;
  instances[3].role = instances[4].role = Role::decode;
  std::set<std::pair<int, int>> seen;
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    Placement p = place("random", instances, random.next());
    seen.insert({p.prefill, p.decode});
  }
  CHECK(seen == std::set<std::pair<int, int>>{{0, 0}, {1, 3}, {1, 4}, {2, 3}, {2, 4}});
}

TEST_CASE("least_loaded weighs queued tokens on P and sequences on D", "[disagg]") {
  std::vector<InstanceView> instances(4);
  instances[0] = {.role = Role::prefill, .queued_tokens = 500};
  instances[1] = {.role = Role::prefill, .queued_tokens = 100};
  instances[2] = {.role = Role::decode, .sequences = 3};
  instances[3] = {.role = Role::decode, .sequences = 2};
  CHECK(place("least_loaded", instances) == Placement{1, 3});
  instances[1].queued_tokens = 600;
  instances[2].sequences = 0;
  CHECK(place("least_loaded", instances) == Placement{0, 2});
}

TEST_CASE("prefix_aware trades a hit against a queue", "[disagg]") {
  std::vector<InstanceView> instances(3);
  instances[0] = {.role = Role::prefill, .queued_tokens = 50, .cached_tokens = 80};
  instances[1] = {.role = Role::prefill};
  instances[2] = {.role = Role::decode};
  CHECK(place("prefix_aware", instances).prefill == 0);
  instances[0].queued_tokens = 81;
  CHECK(place("prefix_aware", instances).prefill == 1);
  CHECK(place("least_loaded", instances).prefill == 1);
}

// ---- Each published rule, by a case computed by hand from its source.

// Three prefill instances and one that decodes; the prompt has 1000 tokens.
struct Case {
  std::vector<InstanceView> instances = {
      {.role = Role::prefill}, {.role = Role::prefill}, {.role = Role::prefill}, {.role = Role::decode}};
  ClusterView view{.prompt_tokens = 1000};
  Placement place(const char* policy, double threshold = 1.5) {
    view.instances = instances;
    return find_placement_policy(policy)->place(view, {.fetch_threshold = threshold});
  }
  InstanceView& operator[](size_t i) { return instances[i]; }
};

TEST_CASE("placement: whoever is eligible is chosen, by every rule, and nobody else", "[placement]") {
  Random random(5);
  for (const PlacementPolicy& policy : placement_policies()) {
    INFO(policy.name);
    for (int trial = 0; trial < 300; ++trial) {
      std::vector<InstanceView> instances(1 + random.below(6));
      bool prefill = false, decode = false;
      for (InstanceView& i : instances) {
        i = {.role = Role(random.below(3)),
             .queued = int(random.below(200)),
             .queued_tokens = int64_t(random.below(9999)),
             .sequences = int(random.below(99)),
             .context_tokens = int64_t(random.below(99999)),
             .available_tokens = int64_t(random.below(99999)),
             .capacity_tokens = 99999,
             .cached_tokens = int(random.below(1000)),
             .queue_s = random.uniform(),
             .prefill_s = random.uniform(),
             .fetch_s = random.uniform(),
             .fetched_prefill_s = random.uniform(),
             .step_s = random.uniform(),
             .step_with_s = random.uniform()};
        prefill |= i.role != Role::decode, decode |= i.role == Role::decode;
      }
      const Placement p = policy.place(
          {.instances = instances, .prompt_tokens = 1000, .number = random.next(), .random = random.next()}, {});
      REQUIRE((p.prefill >= 0) == prefill);
      if (!prefill) continue;
      const Role role = instances[size_t(p.prefill)].role;
      REQUIRE(role != Role::decode);
      if (role == Role::colocated) REQUIRE(p.decode == p.prefill);
      if (role == Role::prefill) REQUIRE((p.decode >= 0) == decode);
      if (role == Role::prefill && decode) REQUIRE(instances[size_t(p.decode)].role == Role::decode);
      if (p.source >= 0)
        REQUIRE(instances[size_t(p.source)].cached_tokens > instances[size_t(p.prefill)].cached_tokens);
    }
  }
}

TEST_CASE("round_robin: in turn", "[placement]") {
  Case c;
  for (c.view.number = 0; c.view.number < 7; ++c.view.number)
    CHECK(c.place("round_robin") == Placement{int(c.view.number % 3), 3});
}

TEST_CASE("mooncake: Algorithm 1 fetches, recomputes or stays", "[placement]") {
  Case c;  // P0 holds 800 tokens and is busy for 2 s; P1 has 400 of them, P2 none
  c[0] = {.role = Role::prefill, .cached_tokens = 800, .queue_s = 2, .prefill_s = 0.2, .fetched_prefill_s = 0.2};
  c[1] = {.role = Role::prefill, .cached_tokens = 400, .prefill_s = 0.6, .fetch_s = 0.3, .fetched_prefill_s = 0.2};
  c[2] = {.role = Role::prefill, .prefill_s = 1.0, .fetch_s = 0.5, .fetched_prefill_s = 0.2};
  CHECK(c.place("mooncake") == Placement{1, 3, 0});      // .3 + .2 there: less than 2.2 and .7
  CHECK(c.place("mooncake", 2) == Placement{1, 3, -1});  // 800 / 400 is not above 2: .6; P2 fetches at .7
  c[1].prefill_s = 0.8;
  CHECK(c.place("mooncake", 2) == Placement{2, 3, 0});     // 800 / 0 is above any threshold
  CHECK(c.place("mooncake", 1e18) == Placement{2, 3, 0});  // … of the infinite kind, too
  c[0].queue_s = 0;
  CHECK(c.place("mooncake") == Placement{0, 3, -1});  // the holder itself fetches nothing
  for (InstanceView& i : c.instances) i.cached_tokens = 0;
  c[2].prefill_s = 0.1;
  CHECK(c.place("mooncake") == Placement{2, 3, -1});  // 0 / 0: nothing to fetch
}

TEST_CASE("lmetric: the product, and why one is added", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 2, .queued_tokens = 500, .cached_tokens = 900};  // (500 + 100) * 3 = 1800
  c[1] = {.role = Role::prefill, .queued = 1, .queued_tokens = 100, .cached_tokens = 0};    // (100 + 1000) * 2 = 2200
  c[2] = {.role = Role::prefill, .queued = 3, .queued_tokens = 0, .cached_tokens = 500};    // (0 + 500) * 4 = 2000
  CHECK(c.place("lmetric").prefill == 0);
  c[0].queued_tokens = 700;  // 800 * 3 = 2400
  CHECK(c.place("lmetric").prefill == 2);
  c[2].queued = 0;  // 500 * 1
  c[1] = {.role = Role::prefill, .cached_tokens = 600};
  CHECK(c.place("lmetric").prefill == 1);  // 400 * 1: both idle, and the better cache wins
}

TEST_CASE("dynamo: blocks to prefill less credit, and blocks to decode", "[placement]") {
  Case c;  // blocks of 10 tokens: 100 of the prompt
  c.view.block_tokens = 10;
  c[0] = {.role = Role::prefill, .queued_tokens = 300, .cached_tokens = 500};                    // 130 - 50 = 80
  c[1] = {.role = Role::prefill, .queued_tokens = 0, .cached_tokens = 100, .host_tokens = 200};  // 100 - 10 - 15 = 75
  c[2] = {.role = Role::prefill, .queued_tokens = 0, .host_tokens = 100, .disk_tokens = 800};  // 100 - 7.5 - 20 = 72.5
  CHECK(c.place("dynamo").prefill == 2);
  c[0].role = c[1].role = c[2].role = Role::colocated;  // and context + prompt in blocks
  c[2].context_tokens = 50;                             // 72.5 + 105; 75 + 100
  CHECK(c.place("dynamo") == Placement{1, 1});
}

TEST_CASE("dynamo_0_1: twice the match, less memory in use and waiting requests", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 4, .available_tokens = 20, .capacity_tokens = 100, .cached_tokens = 800};
  c[1] = {.role = Role::prefill, .queued = 1, .available_tokens = 50, .capacity_tokens = 100, .cached_tokens = 320};
  c[2] = {.role = Role::prefill, .queued = 2, .available_tokens = 100, .capacity_tokens = 100, .cached_tokens = 160};
  CHECK(c.place("dynamo_0_1").prefill == 1);  // 1.6 - .8 - 1 = -.2; .64 - .5 - .25 = -.11; .32 - 0 - .5 = -.18
  c[0].queued = 3;                            // 1.6 - .8 - 1; .64 - .5 - .33 = -.19; .32 - .67 = -.35
  c[1].available_tokens = 40;                 // -.29
  CHECK(c.place("dynamo_0_1").prefill == 0);
  for (InstanceView& i : c.instances) i.queued = 0;  // nobody waits: .8, .04 and .32
  CHECK(c.place("dynamo_0_1").prefill == 0);
  c[0] = c[2];  // two of .32 draw lots; decoding goes to the fewest sequences
  std::set<int> drawn;
  for (c.view.random = 0; c.view.random < 8; ++c.view.random) drawn.insert(c.place("dynamo_0_1").prefill);
  CHECK(drawn == std::set{0, 2});
}

TEST_CASE("sglang: the holder, else the smallest tree, else the shortest queue", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 70, .indexed_tokens = 9000, .cached_tokens = 310};
  c[1] = {.role = Role::prefill, .queued = 10, .indexed_tokens = 500, .cached_tokens = 0};
  c[2] = {.role = Role::prefill, .queued = 20, .indexed_tokens = 400, .cached_tokens = 0};
  CHECK(c.place("sglang").prefill == 0);          // 70 - 10 is not above 64; .31 is above .3
  CHECK(c.place("sglang_library").prefill == 1);  // 60 is above 32, 7 times is above 1.0001
  c[0].queued = 75;
  CHECK(c.place("sglang").prefill == 1);  // 65 and 7.5 times
  c[0].queued = 20;
  CHECK(c.place("sglang_library").prefill == 2);  // .31 is not above .5
}

TEST_CASE("llm_d: ten times the prefix, a little queue and memory", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 128, .capacity_tokens = 100, .cached_tokens = 500};  // 10 + 0 + 0
  c[1] = {
      .role = Role::prefill, .available_tokens = 100, .capacity_tokens = 100, .cached_tokens = 440};    // 8.8 + .5 + 1
  c[2] = {.role = Role::prefill, .available_tokens = 100, .capacity_tokens = 100, .cached_tokens = 0};  // 0 + .5 + 1
  CHECK(c.place("llm_d").prefill == 1);                                                                 // 10.3
  c[1].queued = 64, c[1].available_tokens = 90;  // 8.8 + .25 + .9 = 9.95
  CHECK(c.place("llm_d").prefill == 0);
}

TEST_CASE("llm_d_latency: near the prefix, within the objectives, with the least to spare", "[placement]") {
  Case c;
  c.view.objectives = {1.0, 0.1};
  c[0] = {.role = Role::prefill, .queue_s = 0.9, .prefill_s = 0.4};  // misses
  c[1] = {.role = Role::prefill, .queue_s = 0.2, .prefill_s = 0.4};
  c[2] = {.role = Role::prefill, .queue_s = 0.0, .prefill_s = 0.4};
  CHECK(c.place("llm_d_latency").prefill == 1);
  c[1].queue_s = c[2].queue_s = 2;
  CHECK(c.place("llm_d_latency").prefill == 0);  // nobody keeps it: who misses least
  c[2].cached_tokens = 800;
  CHECK(c.place("llm_d_latency").prefill == 2);  // .8 of it is there, 1.1 s longer
  c[2].queue_s = 6.5;
  CHECK(c.place("llm_d_latency").prefill == 0);  // 5.6 s longer
}

TEST_CASE("preble: exploits above a half, else explores the least work and eviction", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .capacity_tokens = 9000, .recent_tokens = 9999, .cached_tokens = 501};
  c[1] = {.role = Role::prefill, .capacity_tokens = 9000, .indexed_tokens = 8600, .recent_tokens = 100};
  c[2] = {.role = Role::prefill, .capacity_tokens = 9000, .indexed_tokens = 100, .recent_tokens = 600};
  CHECK(c.place("preble").prefill == 0);
  c[0].cached_tokens = 500;  // 1: 100 + 1000 + 600 of 1000 must go; 2: 600 + 1000
  CHECK(c.place("preble").prefill == 2);
  c[1].indexed_tokens = 8400;  // 400 must go
  CHECK(c.place("preble").prefill == 1);
}

TEST_CASE("aibrix: the best match among those that are not much busier than the mean", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 8, .cached_tokens = 900};
  c[1] = {.role = Role::prefill, .queued = 2, .cached_tokens = 300};
  c[2] = {.role = Role::prefill, .queued = 0, .cached_tokens = 300};
  CHECK(c.place("aibrix").prefill == 2);  // mean 10/3, deviation 3.40: 8 is above 6.73; equal matches, fewer requests
  c[0].queued = 6;                        // mean 8/3, deviation 2.49: 6 is above 5.16
  CHECK(c.place("aibrix").prefill == 2);
  c[2].queued = 5;  // mean 13/3, deviation 1.70: 6 is below 6.03
  CHECK(c.place("aibrix").prefill == 0);
  c[2].queued = 16;  // the gap is 14
  CHECK(c.place("aibrix").prefill == 1);
}

TEST_CASE("production_stack: the matched share less the load's excess over the mean", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 6, .cached_tokens = 900};  // .9 - (6 - 4) / 4 = .4
  c[1] = {.role = Role::prefill, .queued = 4, .cached_tokens = 350};  // .35
  c[2] = {.role = Role::prefill, .queued = 2, .cached_tokens = 0};    // .5
  CHECK(c.place("production_stack").prefill == 2);
  c[1].cached_tokens = 550;
  CHECK(c.place("production_stack").prefill == 1);
}

TEST_CASE("polyserve: the most loaded that still keeps the objectives", "[placement]") {
  Case c;
  c.instances.push_back({.role = Role::decode});
  c[0] = {.role = Role::prefill, .queue_s = 4.8, .prefill_s = 0.3};  // 5.1 s
  c[1] = {.role = Role::prefill, .queue_s = 3.0, .prefill_s = 0.3};
  c[2] = {.role = Role::prefill, .queue_s = 1.0, .prefill_s = 0.3};
  c[3] = {.role = Role::decode, .sequences = 9, .step_with_s = 0.041};
  c[4] = {.role = Role::decode, .sequences = 5, .step_with_s = 0.039};
  CHECK(c.place("polyserve") == Placement{1, 4});
  c.view.objectives.ttft_s = 2;
  CHECK(c.place("polyserve").prefill == 2);
  c.view.objectives.ttft_s = 0.5;
  c[4].step_with_s = 0.05;
  CHECK(c.place("polyserve") == Placement{2, 3});  // nobody: the quickest
}

TEST_CASE("eldr: the least loaded of those within a tenth of the best match", "[placement]") {
  Case c;
  c[0] = {.role = Role::prefill, .queued = 9, .cached_tokens = 900};
  c[1] = {.role = Role::prefill, .queued = 3, .cached_tokens = 810};
  c[2] = {.role = Role::prefill, .queued = 0, .cached_tokens = 790};
  CHECK(c.place("eldr").prefill == 1);
}

TEST_CASE("regret_ratio: lost over novel and lost", "[placement]") {
  Case c;
  c[0].cached_tokens = 800, c[1].cached_tokens = 300;
  c.view.instances = c.instances;
  CHECK(regret_ratio(c.view, 0) == 0);
  CHECK(regret_ratio(c.view, 1) == 500.0 / (200 + 500));
  c[0].cached_tokens = 1000;
  CHECK(regret_ratio(c.view, 0) == 0);
}

}  // namespace
}  // namespace xpyd::testing::placement_test
