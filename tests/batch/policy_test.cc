#include "batch/policies/policy.h"

#include "base/random.h"
#include "batch/policies/admission.h"
#include "tests/catch.h"

namespace xpyd::testing::policy_test {

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

// n_output 2: the sequence has decoded; 1: its first token comes from its prompt's step.
SequenceView decoding(int tokens, int n_output = 2) {
  return {.n_tokens = tokens,
          .n_computed = tokens - 1,
          .n_limit = tokens + 50,
          .n_blocks = (tokens + 14) / 16,
          .n_output = n_output};
}
SequenceView prompt(int tokens, int computed = 0, int held = 0) {
  return {.n_tokens = tokens,
          .n_computed = computed,
          .n_limit = tokens + 50,
          .n_blocks = (computed + 15) / 16,
          .n_held = held};
}
// A decoding sequence whose next token needs a block.
SequenceView at_edge(int tokens) {
  SequenceView s = decoding(tokens);
  s.n_blocks = (tokens - 1) / 16;
  return s;
}

TEST_CASE("policies: each plan equals the one made by hand", "[batch]") {
  using Runs = std::vector<ScheduledRun>;
  const SequenceView p5 = prompt(5), p30 = prompt(30);
  const AdmissionRule* const longest = find_admission_rule("longest");  // 30 tokens may become 80, which are 5 blocks
  const AdmissionRule* const only_prompt = find_admission_rule("prompt");
  struct {
    const char *what, *policy;  // "": every policy
    Scene scene;
    Runs runs, admits;
    std::vector<int> preempts = {};
  } const cases[] = {
      {"decodes first, then pieces of prompts",
       "chunked",
       {.running = {decoding(20), prompt(100, 40), decoding(33)}, .waiting = {p30, p5}},
       {{0, 1}, {1, 60}, {2, 1}},
       {{0, 2}}},
      {"what the chunk policy holds back is left for another step, and nobody overtakes it",
       "",
       {.running = {prompt(100, 40, 44), prompt(90, 32, 58)}, .waiting = {prompt(30, 0, 10), prompt(5, 0, 5), p5}},
       {{0, 16}},
       {{0, 20}}},
      {"prompts alone", "prefill_first", {.running = {decoding(20), decoding(33)}, .waiting = {p30}}, {}, {{0, 30}}},
      {"then decodes alone", "prefill_first", {.running = {decoding(20), decoding(33)}}, {{0, 1}, {1, 1}}, {}},
      {"nobody joins a running batch", "static", {.running = {decoding(20)}, .waiting = {p30, p30}}, {{0, 1}}, {}},
      {"memory is held for the longest output",
       "static",
       {.waiting = {p30, p30, p30}, .available = 11},
       {},
       {{0, 30}, {1, 30}}},
      {"a batch forms as long as nobody has decoded",
       "static",
       {.running = {decoding(101, 1)}, .waiting = {p30, p30}},
       {},
       {{0, 30}, {1, 30}}},
      {"… until it decodes", "static", {.running = {decoding(101)}, .waiting = {p30, p30}}, {{0, 1}}, {}},
      {"whole prompts join the decodes",
       "persistent",
       {.running = {decoding(20), decoding(33)}, .waiting = {prompt(40), prompt(50)}},
       {{0, 1}, {1, 1}},
       {{0, 40}}},
      {"… unless no step could hold them",
       "persistent",
       {.running = {decoding(20), decoding(33)}, .waiting = {prompt(200)}},
       {{0, 1}, {1, 1}},
       {{0, 62}}},
      {"it asks the rule that it is given",
       "",
       {.waiting = {p30, p30}, .available = 9, .rule = longest},
       {},
       {{0, 30}}},
      {"… whichever", "", {.waiting = {p30, p30}, .available = 9, .rule = only_prompt}, {}, {{0, 30}, {1, 30}}},
      {"a full batch",
       "chunked",
       {.waiting = {p30, prompt(200), p5}, .max_batch = 2, .step = 512},
       {},
       {{0, 30}, {1, 200}}},
      {"the second does not fit, and the third does not overtake it",
       "chunked",
       {.waiting = {p30, prompt(200), p5}, .available = 10, .max_batch = 3, .step = 512},
       {},
       {{0, 30}}},
      {"the youngest is preempted, and what it had is counted again",
       "chunked",
       {.running = {at_edge(33), at_edge(17), at_edge(49)}, .available = 0},
       {{0, 1}, {1, 1}},
       {},
       {2}},
  };
  for (const auto& c : cases)
    for (const BatchPolicy& policy : batch_policies()) {
      if (*c.policy != 0 && c.policy != std::string(policy.name)) continue;
      INFO(policy.name << ": " << c.what);
      const BatchPlan plan = c.scene.plan(policy.name);
      CHECK(plan.runs == c.runs);
      CHECK(plan.admits == c.admits);
      CHECK(plan.preempts == c.preempts);
    }
}

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

}  // namespace xpyd::testing::policy_test
