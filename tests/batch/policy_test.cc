#include "batch/policy.h"

#include <numeric>

#include "base/random.h"
#include "batch/admission.h"
#include "tests/catch.h"

namespace xpyd::testing::policy_test {
namespace {

struct Scene {
  std::vector<SequenceView> running, waiting;
  int available = 100, capacity = 100, block = 16, max_batch = 8, step = 64;
  const AdmissionRule* rule = nullptr;
  int layers = 0, chunk = 0;
  BatchPlan plan(const char* policy) const {
    BatchView view{running, waiting, available, capacity, block, max_batch, step, rule, layers, chunk};
    BatchPlan result;
    find_batch_policy(policy)->plan(view, result);
    return result;
  }
};

SequenceView decoding(int tokens) {
  return {.n_tokens = tokens, .n_computed = tokens - 1, .n_limit = tokens + 50, .n_blocks = (tokens + 14) / 16};
}
SequenceView prompt(int tokens, int computed = 0) {
  return {.n_tokens = tokens, .n_computed = computed, .n_limit = tokens + 50, .n_blocks = (computed + 15) / 16};
}

TEST_CASE("chunked: decodes first, then pieces of prompts", "[batch]") {
  Scene scene{.running = {decoding(20), prompt(100, 40), decoding(33)}, .waiting = {prompt(30), prompt(5)}};
  BatchPlan plan = scene.plan("chunked");
  REQUIRE(plan.preempts.empty());
  REQUIRE(plan.runs.size() == 3);
  CHECK(plan.runs[0].n_tokens == 1);
  CHECK(plan.runs[1].n_tokens == 60);
  CHECK(plan.runs[2].n_tokens == 1);
  REQUIRE(plan.admits.size() == 1);  // two tokens of the step are left
  CHECK(plan.admits[0].n_tokens == 2);
}

TEST_CASE("what the chunk policy holds back is left for another step, and nobody overtakes it", "[batch]") {
  for (const BatchPolicy& policy : batch_policies()) {
    INFO(policy.name);
    Scene scene{.running = {prompt(100, 40), prompt(90, 32)}, .waiting = {prompt(30), prompt(5), prompt(5)}};
    scene.running[0].n_held = 44, scene.running[1].n_held = 58;
    scene.waiting[0].n_held = 10, scene.waiting[1].n_held = 5;
    const BatchPlan plan = scene.plan(policy.name);
    CHECK(plan.runs == std::vector<ScheduledRun>{{0, 16}});
    CHECK(plan.admits == std::vector<ScheduledRun>{{0, 20}});
  }
}

TEST_CASE("prefill_first: prompts alone, then decodes alone", "[batch]") {
  Scene scene{.running = {decoding(20), decoding(33)}, .waiting = {prompt(30)}};
  BatchPlan plan = scene.plan("prefill_first");
  CHECK(plan.runs.empty());
  REQUIRE(plan.admits.size() == 1);
  CHECK(plan.admits[0].n_tokens == 30);
  scene.waiting.clear();
  plan = scene.plan("prefill_first");
  CHECK(plan.runs.size() == 2);
}

TEST_CASE("static: nobody joins a running batch, and memory is held for the longest output", "[batch]") {
  Scene scene{.running = {decoding(20)}, .waiting = {prompt(30), prompt(30), prompt(30)}};
  scene.running[0].n_output = 2;
  CHECK(scene.plan("static").admits.empty());
  scene.running.clear();
  CHECK(scene.plan("static").admits.size() == 3);
  scene.available = 11;  // 80 tokens are 5 blocks: two fit
  CHECK(scene.plan("static").admits.size() == 2);
}

TEST_CASE("static: a batch forms over several steps, until it decodes", "[batch]") {
  Scene scene{.running = {prompt(100, 64)}, .waiting = {prompt(30), prompt(30)}};
  BatchPlan plan = scene.plan("static");
  REQUIRE(plan.runs.size() == 1);
  CHECK(plan.runs[0].n_tokens == 36);
  REQUIRE(plan.admits.size() == 1);  // the rest of the step
  CHECK(plan.admits[0].n_tokens == 28);
  scene.running = {decoding(101)};
  scene.running[0].n_output = 1;  // of the prompt's step: nobody has decoded
  CHECK(scene.plan("static").runs.empty());
  CHECK(scene.plan("static").admits.size() == 2);
  scene.running[0].n_output = 2;
  CHECK(scene.plan("static").runs.size() == 1);
  CHECK(scene.plan("static").admits.empty());
}

TEST_CASE("persistent: whole prompts join the decodes, unless no step could hold them", "[batch]") {
  Scene scene{.running = {decoding(20), decoding(33)}, .waiting = {prompt(40), prompt(50)}};
  BatchPlan plan = scene.plan("persistent");
  CHECK(plan.runs.size() == 2);
  REQUIRE(plan.admits.size() == 1);
  CHECK(plan.admits[0].n_tokens == 40);
  scene.waiting = {prompt(200)};
  plan = scene.plan("persistent");
  REQUIRE(plan.admits.size() == 1);
  CHECK(plan.admits[0].n_tokens == 62);
}

SequenceView layered(int tokens, int layers_done) {
  SequenceView view = prompt(tokens);
  view.n_layered = tokens, view.layers_done = layers_done, view.n_blocks = (tokens + 15) / 16;
  return view;
}

TEST_CASE("layered: a group of layers of all prompts in each step, beside every decode", "[batch]") {
  // 240 tokens in chunks of 64 would take 4 steps: 10 layers in four groups.
  Scene scene{.running = {decoding(20)}, .waiting = {prompt(200), prompt(40), prompt(50)}, .step = 241};
  scene.layers = 10, scene.chunk = 64;
  BatchPlan plan = scene.plan("layered");
  CHECK(plan.runs == std::vector<ScheduledRun>{{0, 1}});
  CHECK(plan.admits == std::vector<ScheduledRun>{{0, 200, 2}, {1, 40, 2}});
  scene.waiting = {prompt(5)};  // waits for the last group's end
  int done = 2;
  for (int end : {5, 7, 10}) {
    scene.running = {decoding(20), layered(200, done), layered(40, done), prompt(9)};
    plan = scene.plan("layered");
    CHECK(plan.runs == std::vector<ScheduledRun>{{0, 1}, {1, 200, end}, {2, 40, end}});
    CHECK(plan.admits.empty());
    done = end;
  }
  // One of them has been aborted: 40 tokens are one group, which goes on from where it is.
  scene.running = {decoding(20), layered(40, 5)};
  CHECK(scene.plan("layered").runs == std::vector<ScheduledRun>{{0, 1}, {1, 40, 10}});
  // A short prompt takes all layers at once, as a chunk would.
  scene.running = {decoding(20), prompt(59)};
  CHECK(scene.plan("layered").runs == std::vector<ScheduledRun>{{0, 1}, {1, 59}});
  CHECK(scene.plan("layered").admits == std::vector<ScheduledRun>{{0, 5}});
  // More decode than when the groups began, and there is no room for both: the group waits.
  scene.running = {decoding(20), layered(240, 5), decoding(30)};
  CHECK(scene.plan("layered").runs == std::vector<ScheduledRun>{{0, 1}, {2, 1}});
  scene.running.pop_back();
  // Who gives its memory up is asked for nothing.
  scene.running = {decoding(17), layered(40, 5), layered(20, 5)};
  scene.running[0].n_blocks = 1, scene.available = 0;
  plan = scene.plan("layered");
  CHECK(plan.preempts == std::vector<int>{2});
  CHECK(plan.runs == std::vector<ScheduledRun>{{0, 1}, {1, 40, 10}});
}

TEST_CASE("layered: as many groups as chunks, at most the layers, and each layer once", "[batch]") {
  Random random(7);
  for (int round = 0; round < 5000; ++round) {
    const int tokens = 2 + int(random.below(3000)), n_layers = 1 + int(random.below(100));
    Scene scene{.available = 1000, .capacity = 1000, .step = 4000};
    scene.layers = n_layers, scene.chunk = 1 + int(random.below(600));
    const int groups = std::min(n_layers, (tokens + scene.chunk - 1) / scene.chunk);
    int steps = 0, done = 0, most = 0, least = n_layers;
    for (scene.running = {prompt(tokens)}; done < n_layers; ++steps) {
      const BatchPlan plan = scene.plan("layered");
      REQUIRE(plan.runs.size() == 1);
      REQUIRE(plan.runs[0].n_tokens == tokens);
      const int end = plan.runs[0].layers == 0 ? n_layers : plan.runs[0].layers;
      REQUIRE((plan.runs[0].layers > 0) == (groups > 1));
      most = std::max(most, end - done), least = std::min(least, end - done);
      done = end;
      scene.running = {layered(tokens, done)};
    }
    REQUIRE(done == n_layers);
    REQUIRE(steps == groups);
    REQUIRE(most - least <= 1);
  }
}

TEST_CASE("every policy asks the rule that it is given", "[batch]") {
  for (const BatchPolicy& policy : batch_policies()) {
    Scene scene{.waiting = {prompt(30), prompt(30), prompt(30)}, .available = 11};
    INFO(policy.name);
    scene.rule = find_admission_rule("longest");  // 80 tokens each
    CHECK(scene.plan(policy.name).admits.size() == 2);
    scene.rule = find_admission_rule("prompt");
    CHECK(scene.plan(policy.name).admits.size() == (std::string(policy.name) == "persistent" ? 2 : 3));
  }
}

TEST_CASE("a full batch and a missing block stop admission in order", "[batch]") {
  Scene scene{.waiting = {prompt(30), prompt(200), prompt(5)}, .max_batch = 3, .step = 512};
  CHECK(scene.plan("chunked").admits.size() == 3);
  scene.max_batch = 2;
  CHECK(scene.plan("chunked").admits.size() == 2);
  scene.max_batch = 3;
  scene.available = 10;  // the second prompt does not fit, so the third does not overtake it
  CHECK(scene.plan("chunked").admits.size() == 1);
  scene.waiting[0].choices = 4;  // counts for four sequences
  CHECK(scene.plan("chunked").admits.empty());
}

TEST_CASE("the youngest is preempted when blocks run out, and what it had is counted again", "[batch]") {
  Scene scene{.running = {decoding(33), decoding(17), decoding(49)}, .available = 0};
  for (SequenceView& s : scene.running) s.n_blocks = (s.n_tokens - 1) / 16;  // each needs a block now
  BatchPlan plan = scene.plan("chunked");
  REQUIRE(plan.preempts == std::vector<int>{2});
  REQUIRE(plan.runs.size() == 2);
  scene.running.resize(1);
  plan = scene.plan("chunked");
  CHECK(plan.preempts == std::vector<int>{0});
  CHECK(plan.runs.empty());
}

// Whatever the scene, a plan keeps its promises.
TEST_CASE("every policy's plan is sound on random scenes", "[batch]") {
  Random random(5);
  for (int round = 0; round < 20000; ++round) {
    Scene scene;
    scene.block = 1 << random.below(6);
    scene.max_batch = 1 + int(random.below(12));
    scene.step = 1 + int(random.below(200));
    int held = 0;
    for (uint64_t i = random.below(uint64_t(scene.max_batch) + 1); i > 0; --i) {
      int tokens = 1 + int(random.below(150));
      int computed = random.below(2) ? tokens - 1 : int(random.below(uint64_t(tokens)));
      SequenceView s{tokens, computed, tokens + 20, (computed + scene.block - 1) / scene.block};
      s.tail_shared = computed % scene.block != 0 && random.below(4) == 0;
      held += s.n_blocks;
      scene.running.push_back(s);
    }
    for (uint64_t i = random.below(6); i > 0; --i) {
      SequenceView s = prompt(1 + int(random.below(150)));
      s.n_blocks = 0;
      s.choices = 1 + int(random.below(3));
      scene.waiting.push_back(s);
    }
    scene.available = int(random.below(40));
    scene.capacity = scene.available + held;
    scene.layers = int(random.below(9)), scene.chunk = 1 + int(random.below(60));
    for (const BatchPolicy& policy : batch_policies()) {
      scene.rule = &admission_rules()[random.below(admission_rules().size())];
      if (policy.layered && scene.layers > 1 && random.below(2) == 0) {  // some are on their way through the layers
        const int done = 1 + int(random.below(uint64_t(scene.layers) - 1));
        for (SequenceView& s : scene.running) {
          if (s.pending() == 1 || random.below(2) == 0) continue;
          s.n_layered = 1 + int(random.below(uint64_t(s.pending()))), s.layers_done = done;
          const int blocks = (s.n_computed + s.n_layered + scene.block - 1) / scene.block;
          scene.capacity += blocks - std::exchange(s.n_blocks, blocks);
          s.tail_shared = false;
        }
      }
      BatchPlan plan = scene.plan(policy.name);
      std::vector<int> state(scene.running.size());
      int blocks = scene.available, tokens = 0, sequences = int(scene.running.size());
      for (int i : plan.preempts) {
        REQUIRE(state[size_t(i)]++ == 0);
        blocks += scene.running[size_t(i)].n_blocks;
        --sequences;
      }
      int last = -1;
      bool decode_only = true;
      for (auto [i, n, layers] : plan.runs) {
        const SequenceView& s = scene.running[size_t(i)];
        if (policy.layered && s.n_layered > 0)
          REQUIRE((n == s.n_layered && layers > s.layers_done && layers <= scene.layers));
        if (!policy.layered) REQUIRE(layers == 0);
        REQUIRE(state[size_t(i)]++ == 0);
        REQUIRE((i > last && n >= 1 && n <= s.pending()));
        last = i;
        blocks -= std::max(0, (s.n_computed + n + scene.block - 1) / scene.block - s.n_blocks) +
                  (s.tail_shared ? 1 : 0);
        tokens += n;
        decode_only &= s.pending() == 1;
      }
      last = -1;
      for (auto [i, n, layers] : plan.admits) {
        REQUIRE((layers >= 0 && (layers == 0 || layers < scene.layers)));
        const SequenceView& s = scene.waiting[size_t(i)];
        REQUIRE((i == last + 1 && n >= 1 && n <= s.pending()));
        last = i;
        blocks -= (n + scene.block - 1) / scene.block;
        tokens += n;
        sequences += s.choices;
        decode_only = false;
      }
      REQUIRE(blocks >= 0);
      REQUIRE((plan.admits.empty() || sequences <= scene.max_batch));
      REQUIRE((decode_only || tokens <= std::max(scene.step, int(scene.running.size()))));
      // Something moves whenever something can.
      const int layered = std::accumulate(scene.running.begin(), scene.running.end(), 0,
                                          [](int sum, const SequenceView& s) { return sum + s.n_layered; });
      if (!scene.running.empty() && (!policy.layered || layered <= scene.step))
        REQUIRE(plan.runs.size() + plan.preempts.size() + plan.admits.size() > 0);
    }
  }
}

}  // namespace
}  // namespace xpyd::testing::policy_test
