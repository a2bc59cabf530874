#include "disagg/conductor/placement.h"

#include <set>

#include "base/random.h"
#include "disagg/instance/cluster.h"
#include "experiments/published_routers.h"
#include "tests/catch.h"

namespace xpyd::testing::placement_test {

TEST_CASE("a topology is parsed, and a wrong one is an error that says what is expected", "[disagg]") {
  CHECK(parse_topology("1C").value() == std::vector{Role::colocated});
  CHECK(parse_topology("2P1D").value() == std::vector{Role::prefill, Role::prefill, Role::decode});
  CHECK(parse_topology("1P1D2C").value().size() == 4);
  CHECK(parse_topology("2C1P1D").value()[0] == Role::colocated);
  for (const char* bad : {"", "P", "1P", "1D", "0C", "1X", "1P1D1", "1C1C", "-1C", "99999C", "1p1d", "65C"}) {
    INFO(bad);
    Result<std::vector<Role>> roles = parse_topology(bad);
    REQUIRE_FALSE(roles.ok());
    CHECK(roles.error().message.find("expected a form such as") != std::string::npos);
  }
}

TEST_CASE("random reaches every eligible pair and no other", "[disagg]") {
  std::vector<InstanceView> instances(5);
  instances[1].role = instances[2].role = Role::prefill;
  instances[3].role = instances[4].role = Role::decode;
  std::set<std::pair<int, int>> seen;
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    const Placement p = find_placement_policy("random")->place({.instances = instances, .random = random.next()}, {});
    seen.insert({p.prefill, p.decode});
  }
  CHECK(seen == std::set<std::pair<int, int>>{{0, 0}, {1, 3}, {1, 4}, {2, 3}, {2, 4}});
}

TEST_CASE("placement: every rule chooses an eligible instance if there is one, and no other", "[placement]") {
  Random random(5);
  for (int trial = 0; trial < 5000; ++trial) {
    const size_t own = placement_policies().size(), row = random.below(own + published_routers().size());
    const PlacementPolicy& policy = row < own ? placement_policies()[row] : published_routers()[row - own];
    INFO(policy.name);
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
    if (p.source >= 0) REQUIRE(instances[size_t(p.source)].cached_tokens > instances[size_t(p.prefill)].cached_tokens);
  }
}

// Three prefill instances and one decode instance. The prompt has 1000 tokens.
struct Case {
  std::vector<InstanceView> instances = {
      {.role = Role::prefill}, {.role = Role::prefill}, {.role = Role::prefill}, {.role = Role::decode}};
  ClusterView view{.prompt_tokens = 1000};
  Placement place(const char* policy, double threshold = 1.5) {
    view.instances = instances;
    return find_router(policy)->place(view, {.fetch_threshold = threshold});
  }
  // Sets the views of the three prefill instances, except their roles.
  void set(InstanceView a, InstanceView b, InstanceView c) {
    const InstanceView all[] = {a, b, c};
    for (size_t i = 0; i < 3; ++i) instances[i] = all[i], instances[i].role = Role::prefill;
  }
  InstanceView& operator[](size_t i) { return instances[i]; }
};

void sglang_case(Case& c) {
  c.set({.queued = 70, .indexed_tokens = 9000, .cached_tokens = 310}, {.queued = 10, .indexed_tokens = 500},
        {.queued = 20, .indexed_tokens = 400});
}

// A case of each published rule, computed by hand from its source. A row changes what the row before has left, unless
// it is the first of its policy.
struct Row {
  const char* policy;
  void (*change)(Case&);
  Placement is;
  double threshold = 1.5;
};
const Row kRows[] = {
    // Queued tokens on P, and sequences on D.
    {"least_loaded",
     [](Case& c) {
       c.set({.queued_tokens = 500}, {.queued_tokens = 100}, {.queued_tokens = 900});
       c[3].sequences = 3;
       c.instances.push_back({.role = Role::decode, .sequences = 2});
     },
     {1, 4}},
    {"least_loaded", [](Case& c) { c[1].queued_tokens = 600, c[3].sequences = 0; }, {0, 3}},
    // Queued tokens and KV in use.
    {"least_tokens",
     [](Case& c) { c.set({.queued_tokens = 60}, {.context_tokens = 50}, {.queued_tokens = 70}); },
     {1, 3}},
    {"least_tokens", [](Case& c) { c[1].queued_tokens = 20; }, {0, 3}},
    // A hit is weighed against a queue.
    {"prefix_aware", [](Case& c) { c.set({.queued_tokens = 50, .cached_tokens = 80}, {}, {}); }, {0, 3}},
    {"prefix_aware", [](Case& c) { c[0].queued_tokens = 81; }, {1, 3}},
    {"round_robin", [](Case& c) { c.view.number = 0; }, {0, 3}},
    {"round_robin", [](Case& c) { c.view.number = 5; }, {2, 3}},
    // Algorithm 1 fetches, recomputes or stays. P0 holds 800 tokens and is busy for 2 s. P1 has 400 of them, and P2 has
    // none.
    {"mooncake",
     [](Case& c) {
       c.set({.cached_tokens = 800, .queue_s = 2, .prefill_s = 0.2, .fetched_prefill_s = 0.2},
             {.cached_tokens = 400, .prefill_s = 0.6, .fetch_s = 0.3, .fetched_prefill_s = 0.2},
             {.prefill_s = 1.0, .fetch_s = 0.5, .fetched_prefill_s = 0.2});
     },
     {1, 3, 0}},                                // P1 fetches: .3 + .2 is less than 2.2 and .7
    {"mooncake", [](Case&) {}, {1, 3, -1}, 2},  // 800 / 400 is not above 2, so P1 computes in .6; P2 fetches in .7
    {"mooncake", [](Case& c) { c[1].prefill_s = 0.8; }, {2, 3, 0}, 2},  // 800 / 0 is above any threshold
    {"mooncake", [](Case& c) { c[0].queue_s = 0; }, {0, 3, -1}},        // the holder itself fetches nothing
    // Tokens to prefill times requests, one added to the requests: 600 * 3, 1100 * 2, 500 * 4.
    {"lmetric",
     [](Case& c) {
       c.set({.queued = 2, .queued_tokens = 500, .cached_tokens = 900}, {.queued = 1, .queued_tokens = 100},
             {.queued = 3, .cached_tokens = 500});
     },
     {0, 3}},
    // Blocks to prefill, less credit for cached ones, plus blocks to decode. At 10 tokens a block: 130 - 50, 100 - 10 -
    // 15, 100 - 7.5 - 20.
    {"dynamo",
     [](Case& c) {
       c.view.block_tokens = 10;
       c.set({.queued_tokens = 300, .cached_tokens = 500}, {.cached_tokens = 100, .host_tokens = 200},
             {.host_tokens = 100, .disk_tokens = 800});
     },
     {2, 3}},
    {"dynamo",
     [](Case& c) {
       for (size_t i = 0; i < 3; ++i) c[i].role = Role::colocated;  // context and prompt count in blocks, too
       c[2].context_tokens = 50;
     },
     {1, 1}},  // 72.5 + 105; 75 + 100
    // Twice the matched share, less memory in use and waiting requests: 1.6 - .8 - 1, .64 - .5 - .25 = -.11, .32 - 0 -
    // .5 = -.18.
    {"dynamo_0_1",
     [](Case& c) {
       c.set({.queued = 4, .available_tokens = 20, .capacity_tokens = 100, .cached_tokens = 800},
             {.queued = 1, .available_tokens = 50, .capacity_tokens = 100, .cached_tokens = 320},
             {.queued = 2, .available_tokens = 100, .capacity_tokens = 100, .cached_tokens = 160});
     },
     {1, 3}},
    // 1.6 - .8 - 1; .64 - .6 - .33 = -.29; .32 - .67 = -.35
    {"dynamo_0_1", [](Case& c) { c[0].queued = 3, c[1].available_tokens = 40; }, {0, 3}},
    // The holder of a match above .3, else the smallest tree. If queues are unequal, the shortest one. Here 70 - 10 is
    // not above 64, and .31 is above .3.
    {"sglang", sglang_case, {0, 3}},
    {"sglang", [](Case& c) { c[0].queued = 75; }, {1, 3}},          // unequal: 65 more, and 7.5 times as many
    {"sglang_library", sglang_case, {1, 3}},                        // 60 is above 32, 7 times is above 1.0001
    {"sglang_library", [](Case& c) { c[0].queued = 20; }, {2, 3}},  // .31 is not above .5
    // Ten times the match as a share of the best, plus parts for queue and memory: 10 + 0 + 0, 8.8 + .5 + 1, 0 + .5 +
    // 1.
    {"llm_d",
     [](Case& c) {
       c.set({.queued = 128, .capacity_tokens = 100, .cached_tokens = 500},
             {.available_tokens = 100, .capacity_tokens = 100, .cached_tokens = 440},
             {.available_tokens = 100, .capacity_tokens = 100});
     },
     {1, 3}},
    // Near the prefix, within the objectives, with the least to spare.
    {"llm_d_latency",
     [](Case& c) {
       c.view.objectives = {1.0, 0.1};
       c.set({.queue_s = 0.9, .prefill_s = 0.4}, {.queue_s = 0.2, .prefill_s = 0.4}, {.prefill_s = 0.4});
     },
     {1, 3}},  // the first one misses its objective
    {"llm_d_latency",
     [](Case& c) { c[1].queue_s = c[2].queue_s = 2; },
     {0, 3}},  // none keeps it: the one that misses least
    {"llm_d_latency",
     [](Case& c) { c[2].cached_tokens = 800; },
     {2, 3}},  // .8 of the prompt is cached, at a queue 1.1 s longer
    // The best match among instances that are not much busier than the mean. The mean is 10/3 and the deviation 3.40,
    // so 8 is above 6.73. Of equal matches the one with fewer requests is taken.
    {"aibrix",
     [](Case& c) {
       c.set({.queued = 8, .cached_tokens = 900}, {.queued = 2, .cached_tokens = 300}, {.cached_tokens = 300});
     },
     {2, 3}},
    {"aibrix", [](Case& c) { c[0].queued = 6; }, {2, 3}},  // mean 8/3, deviation 2.49: 6 is above 5.16
    {"aibrix", [](Case& c) { c[2].queued = 5; }, {0, 3}},  // mean 13/3, deviation 1.70: 6 is below 6.03
    // The matched share less the load's excess over the mean: .9 - (6 - 4) / 4 = .4, .35, .5.
    {"production_stack",
     [](Case& c) { c.set({.queued = 6, .cached_tokens = 900}, {.queued = 4, .cached_tokens = 350}, {.queued = 2}); },
     {2, 3}},
    // The most loaded instance that still keeps the objectives: 5.1 s, 3.3 s, 1.3 s.
    {"polyserve",
     [](Case& c) {
       c.set({.queue_s = 4.8, .prefill_s = 0.3}, {.queue_s = 3.0, .prefill_s = 0.3},
             {.queue_s = 1.0, .prefill_s = 0.3});
       c[3] = {.role = Role::decode, .sequences = 9, .step_with_s = 0.041};
       c.instances.push_back({.role = Role::decode, .sequences = 5, .step_with_s = 0.039});
     },
     {1, 4}},
    // None keeps them: the quickest.
    {"polyserve", [](Case& c) { c.view.objectives.ttft_s = 0.5, c[4].step_with_s = 0.05; }, {2, 3}},
    // The least loaded instance within a tenth of the best match.
    {"eldr",
     [](Case& c) {
       c.set({.queued = 9, .cached_tokens = 900}, {.queued = 3, .cached_tokens = 810}, {.cached_tokens = 790});
     },
     {1, 3}},
};

TEST_CASE("placement: each published rule chooses what was computed by hand", "[placement]") {
  Case c;
  std::set<std::string> seen = {"random"};
  for (const Row& row : kRows) {
    INFO(row.policy << ", row " << &row - kRows);
    if (seen.insert(row.policy).second) c = Case();
    row.change(c);
    CHECK(c.place(row.policy, row.threshold) == row.is);
  }
  CHECK(seen.size() == placement_policies().size() + published_routers().size());
  // dynamo_0_1: two instances have .32, and one is drawn.
  c = Case();
  c.set({.cached_tokens = 160}, {.available_tokens = 40, .capacity_tokens = 100, .cached_tokens = 320},
        {.cached_tokens = 160});
  std::set<int> drawn;
  for (c.view.random = 0; c.view.random < 8; ++c.view.random) drawn.insert(c.place("dynamo_0_1").prefill);
  CHECK(drawn == std::set{0, 2});
}

TEST_CASE("regret_ratio: lost tokens are divided by novel and lost ones", "[placement]") {
  Case c;
  c[0].cached_tokens = 800, c[1].cached_tokens = 300;
  c.view.instances = c.instances;
  CHECK(regret_ratio(c.view, 0) == 0);
  CHECK(regret_ratio(c.view, 1) == 500.0 / (200 + 500));
  c[0].cached_tokens = 1000;
  CHECK(regret_ratio(c.view, 0) == 0);
}

}  // namespace xpyd::testing::placement_test
