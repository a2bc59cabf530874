#include "batch/policy.h"

#include "base/random.h"
#include "batch/admission.h"
#include "tests/catch.h"

namespace xpyd::testing::policy_test {
namespace {

struct Scene {
  std::vector<SequenceView> running, waiting;
  int available = 100, capacity = 100, block = 16, max_batch = 8, step = 64;
  const AdmissionRule* rule = nullptr;
  BatchPlan plan(const char* policy) const {
    BatchView view{running, waiting, available, capacity, block, max_batch, step, rule};
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
    for (const BatchPolicy& policy : batch_policies()) {
      scene.rule = &admission_rules()[random.below(admission_rules().size())];
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
      for (auto [i, n] : plan.runs) {
        const SequenceView& s = scene.running[size_t(i)];
        REQUIRE(state[size_t(i)]++ == 0);
        REQUIRE((i > last && n >= 1 && n <= s.pending()));
        last = i;
        blocks -= std::max(0, (s.n_computed + n + scene.block - 1) / scene.block - s.n_blocks) +
                  (s.tail_shared ? 1 : 0);
        tokens += n;
        decode_only &= s.pending() == 1;
      }
      last = -1;
      for (auto [i, n] : plan.admits) {
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
      if (!scene.running.empty()) REQUIRE(plan.runs.size() + plan.preempts.size() + plan.admits.size() > 0);
    }
  }
}

}  // namespace
}  // namespace xpyd::testing::policy_test
