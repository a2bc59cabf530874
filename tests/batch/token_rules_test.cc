// Rules of single tokens through whole clusters: the output obeys them, and is the same with drafts, on one instance
// or two, and with logprobs.
#include <algorithm>

#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::token_rules_test {
namespace {

struct Case {
  const char* what;
  TokenRules rules;
  std::vector<int32_t> stops = {};
  int min_tokens = 0;
};

std::vector<Case> cases() {
  TokenRules few{.allowed = {3, 4, 5, 6, 7}};
  TokenRules biased{.bias = {{11, 30}, {12, 29.5f}}};
  TokenRules no_pairs{.allowed = {3, 4, 5}, .bad_words = {{{3, 3}}, {{4, 4}}, {{5, 5}}}};
  std::vector<int32_t> most;  // three tokens of four end a text
  for (int32_t id = 0; id < 96; ++id)
    if (id % 4 != 0) most.push_back(id);
  TokenRules longer{.end_tokens = most, .min_tokens = 12};
  return {{"allowed", few}, {"biased", biased}, {"bad words", no_pairs}, {"at least", longer, most, 12}};
}

struct Outcome {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<FinishReason> finishes;
  int64_t accepted = 0;
  bool operator==(const Outcome& o) const { return tokens == o.tokens && finishes == o.finishes; }
};

Outcome run(const TinySetup& setup, const Case& c, float temperature, int top_logprobs) {
  TinyCluster tiny(setup);
  uint64_t id = 0;
  for (const auto& prompt : ragged_prompts()) {
    auto request = tiny_request(id, prompt, 24);
    request->sampling.temperature = temperature;
    request->sampling.seed = id;
    request->sampling.top_logprobs = top_logprobs;
    request->sampling.rules = std::make_shared<TokenRules>(c.rules);
    request->stop_token_ids = c.stops;
    request->min_tokens = c.min_tokens;
    request->n = 1 + int(id % 2);
    REQUIRE(tiny.submit(request).ok());
    ++id;
  }
  tiny.run();
  Outcome out;
  for (uint64_t i = 0; i < id; ++i)
    for (int choice = 0; choice <= int(i % 2); ++choice) {
      out.tokens.push_back(tiny.recorder->choice(i, choice).tokens);
      out.finishes.push_back(tiny.recorder->choice(i, choice).finish);
    }
  for (const InstanceStats& stats : tiny.cluster->stats().instances) out.accepted += stats.accepted_tokens;
  return out;
}

void check_obeys(const Case& c, const Outcome& out) {
  const auto& rules = c.rules;
  for (size_t i = 0; i < out.tokens.size(); ++i) {
    const std::vector<int32_t>& tokens = out.tokens[i];
    CAPTURE(i, tokens);
    REQUIRE(!tokens.empty());
    for (size_t at = 0; at < tokens.size(); ++at) {
      if (!rules.allowed.empty()) CHECK(std::ranges::count(rules.allowed, tokens[at]) == 1);
      if (!rules.bias.empty()) CHECK((tokens[at] == 11 || tokens[at] == 12));
      if (!rules.bad_words.empty() && at > 0) CHECK(tokens[at] != tokens[at - 1]);
    }
    if (c.min_tokens == 0) continue;
    // No end token among the first ones, and the text ends with the first one after them.
    const auto first = std::ranges::find_if(tokens, [&](int32_t t) { return std::ranges::count(c.stops, t) > 0; });
    CHECK(first - tokens.begin() >= c.min_tokens);
    if (first != tokens.end()) CHECK(first + 1 == tokens.end());
    CHECK(out.finishes[i] == (first == tokens.end() ? FinishReason::length : FinishReason::stop));
  }
}

TEST_CASE("rules: outputs obey them, whatever runs them", "[batch][sampler]") {
  int64_t accepted = 0;
  for (const Case& c : cases())
    for (const float temperature : {0.0f, 1.0f}) {
      const Outcome plain = run({.topology = "1C"}, c, temperature, -1);
      INFO(c.what << ", temperature " << temperature);
      check_obeys(c, plain);
      if (c.min_tokens > 0) CHECK(std::ranges::count(plain.finishes, FinishReason::stop) > 0);
      for (const char* topology : {"1C", "1P1D"})
        for (const bool drafts : {false, true}) {
          TinySetup setup{.topology = topology};
          if (drafts) setup.speculation = {find_drafter("ngram"), 4};
          INFO(setup.describe());
          const Outcome other = run(setup, c, temperature, drafts ? -1 : 2);
          CHECK(other == plain);
          accepted += other.accepted;
        }
    }
  CHECK(accepted > 100);
}

}  // namespace
}  // namespace xpyd::testing::token_rules_test
