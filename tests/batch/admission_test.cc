// Admission rules against the same sequences played to their end, step by step.
#include "batch/policies/admission.h"

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "base/random.h"
#include "batch/engine/engine.h"
#include "experiments/null_model.h"
#include "experiments/tally.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::admission_test {
namespace {

// One sequence as it is played: its tokens with KV after each step.
struct Played {
  int prompt, choices, output, computed, step = 0;
  bool in_place = true;  // its prompt's KV is there
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Returns the blocks that the sequences hold at the worst moment, if all decode in every step. A sequence without its
// prompt's KV computes it in the first step, or before it if `prompts_alone`.
int peak_blocks(std::vector<Played> all, int block, bool prompts_alone) {
  int peak = 0;
  auto look = [&] {
    int sum = 0;
    for (const Played& p : all) {
      if (p.output == 0 || p.computed == 0) continue;
      const int shared = p.computed > p.prompt ? p.prompt / block : 0;
      const int copies = p.computed > p.prompt ? p.choices : 1;
      sum += shared + copies * (ceil_div(p.computed, block) - shared);
      sum += copies > 1 && p.prompt % block != 0;  // a copy that turns out not to be needed
    }
    peak = std::max(peak, sum);
  };
  auto compute = [](Played& p) {
    p.computed = p.in_place ? p.computed + 1 : p.prompt;
    p.in_place = true;
  };
  auto sample = [](Played& p) { p.output -= p.output > 0; };
  if (prompts_alone) {
    for (Played& p : all)
      if (!p.in_place) compute(p);
    look();
    for (Played& p : all)
      if (p.step == 0 && p.computed == p.prompt) sample(p);
  }
  for (bool more = true; more;) {
    more = false;
    for (Played& p : all)
      if (p.output > 0) compute(p), more = true;
    look();
    for (Played& p : all) sample(p);
  }
  return peak;
}

TEST_CASE("peak_tokens admits only sequences whose common peak fits, and refuses none that fits with room to spare",
          "[batch]") {
  Random random(11);
  const AdmissionRule& rule = *find_admission_rule("peak_tokens");
  int full = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const int block = round % 3 == 0 ? 1 : round % 3 == 1 ? 16 : 512;
    const bool alone = random.below(2);
    std::vector<SequenceView> running, waiting;
    std::vector<Played> played;
    int held = 0;
    auto below = [&](int n) { return int(random.below(uint64_t(n))); };
    for (int i = 1 + below(6); i > 0; --i) {  // decoding
      const int prompt = 1 + below(100), left = 1 + below(60), made = 1 + below(20);
      SequenceView s{.n_tokens = prompt + made, .n_computed = prompt + made - 1};
      s.n_limit = prompt + made + left;
      s.n_output = made;
      s.n_blocks = ceil_div(s.n_computed, block);
      held += s.n_blocks;
      running.push_back(s);
      played.push_back({s.n_computed, 1, left, s.n_computed, 1});
    }
    for (int i = 1 + below(6); i > 0; --i) {
      SequenceView s{.n_tokens = 1 + below(100)};
      s.choices = below(4) == 0 ? 2 + below(3) : 1;
      s.n_limit = s.n_tokens + 1 + below(60);
      waiting.push_back(s);
    }
    const int available = below(block == 1 ? 600 : block == 16 ? 40 : 12);
    std::vector<Scheduled> going, candidates;
    for (const SequenceView& s : running) going.push_back({&s, alone ? 0 : 1});
    for (const SequenceView& s : waiting) candidates.push_back({&s, s.n_tokens});
    const int admitted = rule.admits({.running = going,
                                      .candidates = candidates,
                                      .available_blocks = available,
                                      .capacity_blocks = available + held,
                                      .block_tokens = block,
                                      .step_tokens = 4096});
    if (peak_blocks(played, block, alone) > available + held) {
      REQUIRE(admitted == 0);
      continue;
    }
    int possible = 0, sure = -1;  // sure: those that fit even if each choice takes two more blocks
    int spare = 2 * int(running.size());
    for (const SequenceView& s : waiting) {
      played.push_back({s.n_tokens, s.choices, s.n_limit - s.n_tokens, 0, 0, false});
      spare += 2 * s.choices;
      const int peak = peak_blocks(played, block, alone);
      if (sure < 0 && peak + spare > available + held) sure = possible;
      if (peak > available + held) break;
      ++possible;
    }
    INFO("round " << round << " block " << block << (alone ? " prompts alone" : ""));
    REQUIRE(admitted <= possible);
    REQUIRE(admitted >= (sure < 0 ? possible : sure));
    full += possible == int(waiting.size());
    refused += possible < int(waiting.size());
  }
  CHECK(full > 1000);
  CHECK(refused > 1000);
}

struct Outcome {
  int64_t preemptions = 0, steps = 0;
};

// Requests of known length arrive a few at a time, into a pool that cannot hold all.
Outcome serve(const std::string& scheme, const std::string& policy, const std::string& rule, int step_tokens,
              uint64_t seed) {
  ModelConfig config = tiny_config();
  KvOptions kv{.shape = kv_shape(config, Dtype::bf16)};
  kv.max_sequence_tokens = 256;
  kv.pool_bytes = 1600 * kv.shape.token_bytes();
  auto pool = make_block_pool(scheme, kv).value();
  auto memory = find_kv_scheme(scheme)->make(pool, kv);
  auto model = make_null_model(config);
  VirtualClock clock;
  Engine engine(*model, *memory,
                {.policy = find_batch_policy(policy),
                 .admission = find_admission_rule(rule),
                 .max_batch = 40,
                 .step_tokens = step_tokens},
                clock, nullptr);
  Random random(seed);
  auto sink = std::make_shared<experiments::Tally>();
  int choices = 0;
  for (int id = 0; id < 120; ++id) {
    auto request = std::make_shared<Request>();
    request->id = uint64_t(id);
    const int prompt = 1 + int(random.below(100)), family = int(random.below(3));
    for (int i = 0; i < prompt; ++i) request->prompt.push_back((i * 7 + (i < 40 ? family : id)) % 96);
    request->sampling.temperature = 0;
    request->max_tokens = 1 + int(random.below(120));
    request->ignore_eos = true;
    request->n = random.below(8) == 0 ? 3 : 1;
    choices += request->n;
    engine.submit(
        make_sequence(request, {.stands_for = request->n}, sink, std::make_shared<std::atomic<bool>>(false), nullptr));
    for (uint64_t turns = random.below(4); turns > 0; --turns) engine.step();
  }
  while (!engine.idle()) REQUIRE(engine.step());
  memory->check_invariants();
  REQUIRE(sink->ended_by(FinishReason::length) == choices);
  return {engine.stats().preemptions, engine.stats().steps};
}

TEST_CASE("with known lengths peak_tokens and longest never preempt, and prompt does", "[batch]") {
  int64_t with_prompt = 0, peak_steps = 0, longest_steps = 0;
  for (const char* scheme : {"paged", "contiguous"})
    for (const char* policy : {"chunked", "persistent", "prefill_first", "static"})
      for (int step : {48, 160, 2048})
        for (uint64_t seed = 0; seed < 4; ++seed) {
          INFO(scheme << " " << policy << " step " << step << " seed " << seed);
          const Outcome peak = serve(scheme, policy, "peak_tokens", step, seed);
          const Outcome longest = serve(scheme, policy, "longest", step, seed);
          CHECK(peak.preemptions == 0);
          CHECK(longest.preemptions == 0);
          with_prompt += serve(scheme, policy, "prompt", step, seed).preemptions;
          peak_steps += peak.steps;
          longest_steps += longest.steps;
        }
  CHECK(with_prompt > 50);
  CHECK(peak_steps < longest_steps);
}

}  // namespace
}  // namespace xpyd::testing::admission_test
