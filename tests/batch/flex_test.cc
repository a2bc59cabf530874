// Flex requests (batch/flex.cc): the plan of all others is the one without them, and what they are made to give up
// costs them time alone.
#include <algorithm>
#include <array>
#include <map>

#include "base/random.h"
#include "batch/admission.h"
#include "batch/engine.h"
#include "batch/policy.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::flex_test {
namespace {

struct Scene {
  std::vector<SequenceView> running, waiting;
  int available = 100, capacity = 100, block = 16, max_batch = 8, step = 64, flex_tokens = 4;
  BatchPlan plan(const char* policy) const {
    const BatchView view{.running = running,
                         .waiting = waiting,
                         .available_blocks = available,
                         .capacity_blocks = capacity,
                         .block_tokens = block,
                         .max_batch = max_batch,
                         .step_tokens = step,
                         .flex_tokens = flex_tokens};
    BatchPlan result;
    plan_batch(*find_batch_policy(policy), view, result);
    return result;
  }
};

SequenceView decoding(int tokens, bool flex) {
  return {.n_tokens = tokens,
          .n_computed = tokens - 1,
          .n_limit = tokens + 50,
          .n_blocks = (tokens + 14) / 16,
          .n_output = 2,
          .flex = flex};
}
SequenceView prompt(int tokens, bool flex, int computed = 0) {
  return {.n_tokens = tokens,
          .n_computed = computed,
          .n_limit = tokens + 50,
          .n_blocks = (computed + 15) / 16,
          .flex = flex};
}

TEST_CASE("flex: a step of their own is whole, beside others they have flex_tokens", "[flex]") {
  Scene scene{.running = {decoding(20, true), prompt(100, true, 16)}};
  CHECK(scene.plan("chunked").runs == std::vector<ScheduledRun>{{0, 1}, {1, 63}});
  scene.running.push_back(decoding(33, false));
  CHECK(scene.plan("chunked").runs == std::vector<ScheduledRun>{{0, 1}, {1, 3}, {2, 1}});
  scene.flex_tokens = 0;
  CHECK(scene.plan("chunked").runs == std::vector<ScheduledRun>{{2, 1}});
  scene.flex_tokens = 4;
  scene.running.push_back(prompt(100, false, 16));  // it has all of the step
  CHECK(scene.plan("chunked").runs == std::vector<ScheduledRun>{{2, 1}, {3, 63}});
}

TEST_CASE("flex: blocks are given up in the plan that needs them, the last ones first", "[flex]") {
  // 8 blocks of two that run, and 2 of one that waits with KV; none is free.
  Scene scene{.running = {decoding(64, true), decoding(64, true)},
              .waiting = {prompt(48, false), prompt(40, true, 32)}};
  scene.available = 0, scene.capacity = 10, scene.step = 48;
  BatchPlan plan = scene.plan("chunked");
  CHECK(plan.admits == std::vector<ScheduledRun>{{0, 48}});
  CHECK(plan.yields == std::vector<int>{1});
  CHECK(plan.preempts == std::vector<int>{1});  // 3 blocks: 2 and 4
  scene.waiting[0] = prompt(32, false);
  plan = scene.plan("chunked");
  CHECK(plan.yields == std::vector<int>{1});
  CHECK(plan.preempts.empty());
  scene.available = 2;
  plan = scene.plan("chunked");
  CHECK(plan.yields.empty());
  CHECK(plan.preempts.empty());
}

TEST_CASE("flex: none starts while another request waits", "[flex]") {
  Scene scene{.running = {decoding(20, false)}, .waiting = {prompt(30, false), prompt(8, true)}};
  scene.step = 100, scene.max_batch = 1;
  CHECK(scene.plan("chunked").admits.empty());
  scene.max_batch = 2;
  CHECK(scene.plan("chunked").admits == std::vector<ScheduledRun>{{0, 30}});
  scene.max_batch = 3;
  CHECK(scene.plan("chunked").admits == std::vector<ScheduledRun>{{0, 30}, {1, 4}});
}

TEST_CASE("flex: all others are planned as if there were none, and the memory is there", "[flex]") {
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    Random random(seed);
    const auto below = [&](int n) { return int(random.below(uint64_t(n))); };
    Scene with{.available = below(12),
               .capacity = 64,
               .max_batch = 1 + below(8),
               .step = 16 + below(64),
               .flex_tokens = below(20)};
    for (int i = below(with.max_batch + 1); i > 0; --i)
      with.running.push_back(below(2) ? decoding(1 + below(90), below(2) == 0)
                                      : prompt(40 + below(60), below(2) == 0, 16 * below(3)));
    for (int i = below(5); i > 0; --i)
      with.waiting.push_back(below(3) ? prompt(1 + below(90), below(2) == 0) : prompt(20 + below(50), true, 16));
    Scene without = with;
    without.running.clear(), without.waiting.clear();
    std::vector<int> running_at, waiting_at;
    for (int i = 0; i < int(with.running.size()); ++i)
      if (const SequenceView& s = with.running[size_t(i)]; s.flex)
        without.available += s.n_blocks;
      else
        without.running.push_back(s), running_at.push_back(i);
    for (int i = 0; i < int(with.waiting.size()); ++i)
      if (const SequenceView& s = with.waiting[size_t(i)]; s.flex)
        without.available += s.n_blocks;
      else
        without.waiting.push_back(s), waiting_at.push_back(i);
    for (const char* policy : {"chunked", "prefill_first", "persistent", "static"}) {
      INFO("seed " << seed << " " << policy);
      const BatchPlan all = with.plan(policy), alone = without.plan(policy);
      const auto mine = [](std::vector<ScheduledRun> runs, const std::vector<SequenceView>& of) {
        std::erase_if(runs, [&](const ScheduledRun& run) { return of[size_t(run.index)].flex; });
        return runs;
      };
      const auto there = [](std::vector<ScheduledRun> runs, const std::vector<int>& at) {
        for (ScheduledRun& run : runs) run.index = at[size_t(run.index)];
        return runs;
      };
      REQUIRE(mine(all.runs, with.running) == there(alone.runs, running_at));
      REQUIRE(mine(all.admits, with.waiting) == there(alone.admits, waiting_at));
      int free = with.available, entries = 0, flex = 0, tokens = 0;
      bool others = !without.running.empty() || !alone.admits.empty();
      std::vector<bool> lost(with.running.size());
      for (int i : all.preempts) free += with.running[size_t(i)].n_blocks, lost[size_t(i)] = true;
      for (int i : all.yields) {
        free += with.waiting[size_t(i)].n_blocks;
        REQUIRE(with.waiting[size_t(i)].flex);
      }
      for (const auto& [runs, of] : {std::pair(&all.runs, &with.running), {&all.admits, &with.waiting}})
        for (const ScheduledRun& run : *runs) {
          const SequenceView& s = (*of)[size_t(run.index)];
          if (runs == &all.runs) REQUIRE_FALSE(lost[size_t(run.index)]);
          free -= new_blocks(s, run.n_tokens, with.block);
          ++entries, tokens += run.n_tokens;
          if (s.flex) flex += run.n_tokens;
        }
      REQUIRE(free >= 0);
      REQUIRE(entries <= with.max_batch);
      if (others) REQUIRE(flex <= with.flex_tokens);
      if (flex > 0) REQUIRE(tokens <= with.step);
    }
  }
}

// Turns, from its arrival, to each request's end.
struct Served {
  std::map<uint64_t, int> turns;
  std::map<uint64_t, Recorder::Choice> choices;
  int64_t preemptions = 0;
};

std::shared_ptr<Request> request(uint64_t id, bool flex) {
  Random random(id * 7 + flex);
  std::vector<int32_t> prompt(20 + random.below(60));
  for (int32_t& token : prompt) token = int32_t(random.below(96));
  auto made = tiny_request(id, prompt, flex ? 40 : 12);
  made->flex = flex;
  return made;
}

// `jobs` at once, and from the fifth turn on every fifth one a plain request, n of them.
Served serve(const TinySetup& setup, int n, int jobs) {
  TinyCluster tiny(setup);
  Served served;
  std::map<uint64_t, int> came;
  for (int i = 0; i < jobs; ++i) REQUIRE(tiny.submit(request(1000 + uint64_t(i), true)).ok());
  for (int turn = 0, still = 0; still < 4 || int(came.size()) < n; ++turn) {
    REQUIRE(turn < 20000);
    if (turn % 5 == 4 && int(came.size()) < n) {
      const auto id = uint64_t(came.size());
      REQUIRE(tiny.submit(request(id, false)).ok());
      came[id] = turn;
    }
    still = tiny.cluster->turn() ? 0 : still + 1;
    for (const auto& instance : tiny.cluster->instances()) instance->memory().check_invariants(true);
    for (const auto& [id, at] : came)
      if (!served.turns.contains(id) && tiny.recorder->choice(id).ends == 1) served.turns[id] = turn - at;
  }
  CHECK(tiny.cluster->wait_idle(0));
  for (int i = 0; i < n; ++i) served.choices[uint64_t(i)] = tiny.recorder->choice(uint64_t(i));
  for (int i = 0; i < jobs; ++i) served.choices[1000 + uint64_t(i)] = tiny.recorder->choice(1000 + uint64_t(i));
  for (const InstanceStats& s : tiny.cluster->stats().instances) served.preemptions += s.preemptions;
  return served;
}

TEST_CASE("flex: others take as many steps as without, every text is its own, and jobs are done", "[flex]") {
  constexpr int kOthers = 12, kJobs = 10;
  for (const char* batching : {"chunked", "prefill_first", "persistent", "static", "layered"})
    for (const char* scheme : {"paged", "slots", "vattention"})
      for (const char* topology : {"1C", "1P1D"}) {
        INFO(batching << " " << scheme << " " << topology);
        const bool slots = scheme != std::string("paged");
        // 24 blocks of 16 tokens: three or four sequences.
        TinySetup setup{.topology = topology,
                        .scheme = scheme,
                        .batching = batching,
                        .prefix_cache = false,
                        .step_tokens = 64,
                        .max_batch = 6,
                        .pool_bytes = slots ? size_t{1} << 20 : size_t{24} * 16 * 256};
        const Served quiet = serve(setup, kOthers, 0), busy = serve(setup, kOthers, kJobs);
        setup.pool_bytes = size_t{4} << 20;
        const Served roomy = serve(setup, kOthers, kJobs);
        for (const auto& [id, choice] : busy.choices) {
          INFO("request " << id);
          CHECK(choice.ends == 1);
          CHECK(choice.finish == FinishReason::length);
          CHECK(choice.tokens == roomy.choices.at(id).tokens);
          CHECK(choice.logits_hash == roomy.choices.at(id).logits_hash);
          if (id < 1000 && topology == std::string("1C") && !slots && quiet.preemptions == 0 &&
              batching != std::string("layered")) {
            CHECK(choice.preemptions == 0);
            CHECK(busy.turns.at(id) == quiet.turns.at(id));
          }
        }
        if (!slots) CHECK(busy.preemptions > quiet.preemptions);
      }
}

TEST_CASE("flex: beside others jobs have no drafts, and take none from them", "[flex]") {
  const auto drafted = [](bool job) {
    TinySetup setup{.topology = "1C", .max_batch = 20};
    setup.speculation = {find_drafter("ngram"), 16};
    TinyCluster tiny(setup);
    const auto ask = [&](uint64_t id, bool flex) {
      auto made = tiny_request(id, std::vector<int32_t>(30, 7), 40);
      made->ignore_eos = true, made->flex = flex;
      REQUIRE(tiny.submit(made).ok());
    };
    if (job) ask(1, true);
    ask(2, false);
    while (tiny.recorder->choice(2).ends == 0) tiny.cluster->turn();
    return tiny.cluster->stats().instances[0].draft_tokens;
  };
  const int64_t alone = drafted(false);
  CHECK(alone > 0);
  CHECK(drafted(true) == alone);
}

TEST_CASE("flex: what jobs share is counted once, and what others hold, too, not at all", "[flex]") {
  ThreadTeam team(1);
  RealClock clock;
  const KvOptions kv{.shape = kv_shape(tiny_config(), Dtype::f32), .pool_bytes = 1 << 20, .max_sequence_tokens = 256};
  const auto memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  const auto model = make_llama(tiny_weights(), team, 64, 8);
  Engine engine(*model, *memory, {.policy = find_batch_policy("chunked"), .max_batch = 8, .step_tokens = 64}, clock,
                nullptr);
  const auto recorder = std::make_shared<Recorder>();
  const auto start = [&](uint64_t id, bool flex) {
    std::vector<int32_t> prompt(64, 7);  // 4 blocks in common, and one of its own
    prompt.push_back(int32_t(id));
    auto request = tiny_request(id, prompt, 10);
    request->ignore_eos = true, request->flex = flex;
    engine.submit(make_sequence(request, {}, recorder, nullptr, nullptr));
    while (recorder->choice(id).tokens.size() < 1) REQUIRE(engine.step());
  };
  for (uint64_t id = 1; id <= 4; ++id) start(id, true);
  CHECK(engine.flex().sequences == 4);
  CHECK(engine.flex().blocks == 4 + 4);
  start(5, false);
  CHECK(engine.flex().sequences == 4);
  CHECK(engine.flex().blocks == 4);
  while (engine.step()) continue;
}

TEST_CASE("flex: a decode instance's room is given up for a prompt that comes", "[flex]") {
  // D holds two jobs and has no room for a third sequence.
  TinySetup setup{.topology = "1P1D", .prefix_cache = false, .pool_bytes = size_t{12} * 16 * 256};
  TinyCluster tiny(setup);
  const auto ask = [&](uint64_t id, bool flex, int output) {
    auto made = tiny_request(id, std::vector<int32_t>(70, int32_t(id)), output);
    made->flex = flex;
    REQUIRE(tiny.submit(made).ok());
  };
  ask(1, true, 90), ask(2, true, 90);
  for (int turn = 0; tiny.recorder->choice(2).tokens.size() < 4; ++turn) {
    REQUIRE(turn < 1000);
    tiny.cluster->turn();
  }
  ask(3, false, 4);
  for (int turn = 0; tiny.recorder->choice(3).ends == 0; ++turn) {
    REQUIRE(turn < 40);  // jobs have some 80 steps to go
    tiny.cluster->turn();
  }
  CHECK(tiny.recorder->choice(1).ends + tiny.recorder->choice(2).ends == 0);
  tiny.run();
  CHECK(tiny.recorder->ended() == 3);
  CHECK(tiny.recorder->choice(1).preemptions + tiny.recorder->choice(2).preemptions > 0);
}

}  // namespace
}  // namespace xpyd::testing::flex_test
