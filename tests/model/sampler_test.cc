// Tests the sampler against a plain one that sorts, and at its edges.
#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "tests/catch.h"

namespace xpyd::testing::sampler_test {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The tokens that may be drawn and their probabilities, by sorting, in double.
std::map<int, double> reference(std::vector<float> logits, const SamplingParams& p) {
  std::vector<int> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  auto better = [&](int a, int b) {
    return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
  };
  std::sort(order.begin(), order.end(), better);
  if (p.top_k > 0 && size_t(p.top_k) < order.size()) order.resize(size_t(p.top_k));
  std::vector<double> weights;
  double total = 0;
  for (int id : order) {
    weights.push_back(std::exp((double(logits[size_t(id)]) - logits[size_t(order[0])]) / p.temperature));
    total += weights.back();
  }
  std::map<int, double> kept;
  double before = 0, kept_total = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (before < p.top_p * total && weights[i] >= p.min_p && weights[i] > 0) {
      kept[order[i]] = weights[i];
      kept_total += weights[i];
    }
    before += weights[i];
  }
  for (auto& [id, weight] : kept) weight /= kept_total;
  return kept;
}

// Draws often and compares the frequencies with the reference by chi-square.
void check_distribution(const std::vector<float>& logits, const SamplingParams& params, int n = 20000) {
  const auto expected = reference(logits, params);
  SamplerState state(params, 0, {});
  SamplerScratch scratch;
  std::map<int, int> counts;
  for (int i = 0; i < n; ++i) ++counts[sample(logits, params, state, scratch).chosen.token];
  double chi2 = 0;
  int cells = 0;
  for (const auto& [id, probability] : expected) {
    if (probability * n < 10) continue;
    const double difference = counts[id] - probability * n;
    chi2 += difference * difference / (probability * n);
    ++cells;
  }
  for (const auto& [id, count] : counts) {
    CAPTURE(id);
    CHECK(expected.count(id) == 1);
  }
  CAPTURE(cells, params.top_k, params.top_p, params.min_p);
  CHECK(chi2 < cells + 5 * std::sqrt(2.0 * cells) + 5);  // five sigma
}

std::vector<float> random_logits(int n, uint64_t seed, double spread = 3) {
  Random random(seed);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& x : logits) x = float((random.uniform() + random.uniform() + random.uniform() - 1.5) * spread);
  return logits;
}

int draw(const std::vector<float>& logits, SamplingParams params, uint64_t seed = 0) {
  params.seed = seed;
  SamplerState state(params, 0, {});
  SamplerScratch scratch;
  return sample(logits, params, state, scratch).chosen.token;
}

TEST_CASE("sampler: greedy takes the lowest id among the highest logits", "[model][sampler]") {
  SamplingParams greedy{.temperature = 0};
  CHECK(draw({1, 5, 2, 5}, greedy) == 1);
  CHECK(draw({-3}, greedy) == 0);
  CHECK(draw({-1, -0.0f, 0.0f}, greedy) == 1);  // -0 equals +0
  for (int n : {3, 4, 5, 8, 127, 4097}) {
    auto logits = random_logits(n, uint64_t(n));
    for (int at : {0, n / 2, n - 1}) {
      auto spiked = logits;
      spiked[size_t(at)] = 100;
      CHECK(draw(spiked, greedy) == at);
      CHECK(draw(spiked, {.temperature = 1, .top_k = 1}) == at);
      CHECK(draw(spiked, {.temperature = 1e-30f}) == at);
    }
  }
}

TEST_CASE("sampler: frequencies agree with a sampler that sorts", "[model][sampler]") {
  const auto logits = random_logits(300, 1);
  for (float temperature : {0.5f, 1.0f, 2.0f}) {
    check_distribution(logits, {.temperature = temperature});
    check_distribution(logits, {.temperature = temperature, .top_k = 7});
    check_distribution(logits, {.temperature = temperature, .top_p = 0.6f});
    check_distribution(logits, {.temperature = temperature, .min_p = 0.3f});
    check_distribution(logits, {.temperature = temperature, .top_k = 40, .top_p = 0.8f, .min_p = 0.05f});
  }
  check_distribution(random_logits(5, 2), {});
  check_distribution({0, 0, 0, 0, 0, 0, 0}, {.top_k = 3});        // ties: the lower ids
  check_distribution({0, 0, 0, 0, 0, 0, 0, 0}, {.top_p = 0.4f});  // keeps ceil(0.4 * 8) = 4
  check_distribution({-kInf, 1, -kInf, 2, 2, -kInf}, {.top_k = 5});
}

TEST_CASE("sampler: filters keep exactly the tokens that they should", "[model][sampler]") {
  // Frequencies do not reveal a rare token that is kept wrongly. So the test compares the sets over many draws, with
  // logits so close that all of them are likely.
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const int n = 3 + int(seed) * 7;
    auto logits = random_logits(n, seed, 0.5);
    if (seed % 3 == 0)
      for (float& x : logits) x = std::round(x * 8) / 8;  // many ties
    Random random(seed);
    SamplingParams params{.temperature = 1, .top_k = 1 + int(random.below(uint64_t(n))), .seed = seed};
    if (seed % 2) params.top_p = float(0.1 + 0.85 * random.uniform());
    if (seed % 5 == 0) params.min_p = 0.7f;
    if (params.top_k == 1) continue;
    const auto expected = reference(logits, params);
    std::set<int> seen;
    SamplerState state(params, 0, {});
    SamplerScratch scratch;
    for (int i = 0; i < 60 * int(expected.size()) + 200; ++i)
      seen.insert(sample(logits, params, state, scratch).chosen.token);
    std::set<int> kept;
    for (const auto& [id, probability] : expected) kept.insert(id);
    CAPTURE(seed, params.top_k, params.top_p, params.min_p);
    CHECK(seen == kept);
  }
}

TEST_CASE("sampler: a vocabulary of 128,256 tokens is drawn with the right frequencies", "[model][sampler]") {
  const int n = 128256;
  auto logits = random_logits(n, 5);
  logits[777] = 9;
  logits[100000] = 9;
  logits[5] = 8.5f;
  check_distribution(logits, {.temperature = 0.4f, .top_k = 3}, 500);
  check_distribution(logits, {.temperature = 0.4f, .top_p = 0.5f}, 500);
  check_distribution(logits, {.temperature = 0.3f, .min_p = 0.1f}, 500);
  check_distribution(logits, {.temperature = 0.7f, .top_k = 50, .top_p = 0.95f}, 500);
  check_distribution(logits, {.temperature = 0.2f}, 500);
}

TEST_CASE("sampler: the repetition penalty covers prompt and output", "[model][sampler]") {
  SamplingParams params{.temperature = 0, .repetition_penalty = 2};
  const std::vector<int32_t> prompt = {1, 1, 3, 99999};  // an id beyond the vocabulary is harmless
  SamplerState state(params, 0, prompt);
  SamplerScratch scratch;
  CHECK(state.prompt_tokens == std::vector<int32_t>{1, 3, 99999});
  auto next = [&](const std::vector<float>& logits) { return sample(logits, params, state, scratch).chosen.token; };
  CHECK(next({1, 1.9f, 0, 0}) == 0);          // 1.9 / 2 < 1
  CHECK(next({1.5f, 0, 1, 0}) == 2);          // 0 was drawn before: 0.75 < 1
  CHECK(next({-1, -1, -1.9f, -1.95f}) == 0);  // -2, -2, -3.8, -3.9: the lowest id of equals
  CHECK(next({-2, -2, -2, -2, -3.9f}) == 4);
}

TEST_CASE("sampler: presence and frequency penalties count output tokens", "[model][sampler]") {
  SamplingParams params{.temperature = 0, .presence_penalty = 1, .frequency_penalty = 0.25f};
  SamplerState state(params, 0, {});
  SamplerScratch scratch;
  std::vector<int> tokens;
  // Token 0 falls from 5 to 5 - 1.25 = 3.75, so token 1 wins with 4 and falls to 4 - 1.25 = 2.75. Token 0 wins again at
  // 3.75, 3.5, 3.25 and 3.0, all above 2.75 and 2.9, until 2.75 < 2.9.
  for (int i = 0; i < 8; ++i)
    tokens.push_back(sample(std::vector<float>{5, 4, 2.9f}, params, state, scratch).chosen.token);
  CHECK(tokens == std::vector<int>{0, 1, 0, 0, 0, 0, 2, 0});
  CHECK(state.prompt_tokens.empty());
  CHECK(state.output_counts.at(0) == 6);
}

TEST_CASE("sampler: filters need more than a plain draw, unless the choice is greedy", "[model][sampler]") {
  CHECK_FALSE(more_than_a_draw({.temperature = 1}));
  CHECK(more_than_a_draw({.temperature = 1, .top_k = 2}));
  CHECK(more_than_a_draw({.temperature = 1, .top_p = 0.9f}));
  CHECK(more_than_a_draw({.temperature = 1, .min_p = 0.1f}));
  CHECK_FALSE(more_than_a_draw({.temperature = 0, .top_k = 2, .top_p = 0.9f, .min_p = 0.1f}));
  CHECK_FALSE(more_than_a_draw({.temperature = 1, .top_k = 1, .top_p = 0.9f}));
  SamplerState state({.temperature = 1, .top_k = 1}, 0, {});
  CHECK(next_draw({.temperature = 1, .top_k = 1}, state).temperature == 0);
}

TEST_CASE("sampler: a sequence that continues elsewhere keeps the state of its penalties", "[model][sampler]") {
  const std::vector<float> logits = random_logits(20, 4, 1);
  const SamplingParams params{.repetition_penalty = 1.2f, .presence_penalty = 0.5f, .frequency_penalty = 0.25f};
  SamplerState here(params, 0, {}), there(params, 0, {});
  SamplerScratch scratch;
  for (int i = 0; i < 40; ++i) {
    const int32_t token = sample(logits, params, here, scratch).chosen.token;
    repeat_draw(params, token, there);
    SamplerState moved = there;
    CHECK(sample(logits, params, moved, scratch).chosen.token == [&] {
      SamplerState same = here;
      return sample(logits, params, same, scratch).chosen.token;
    }());
  }
}

TEST_CASE("sampler: logprobs are the log-softmax of the raw logits", "[model][sampler]") {
  const auto logits = random_logits(1000, 8);
  double sum = 0;
  for (float x : logits) sum += std::exp(double(x));
  std::vector<int> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[size_t(a)] > logits[size_t(b)]; });
  for (int n_top : {0, 1, 5, 20}) {
    // Penalties, temperature and filters change the choice and not the logprobs.
    SamplingParams params{.temperature = 0.3f, .top_k = 4, .repetition_penalty = 1.7f, .top_logprobs = n_top};
    SamplerState state(params, 0, std::vector<int32_t>{1, 2, 3});
    SamplerScratch scratch;
    const Sampled s = sample(logits, params, state, scratch);
    CHECK(s.chosen.logprob == Approx(double(logits[size_t(s.chosen.token)]) - std::log(sum)).margin(1e-5));
    REQUIRE(int(s.top.size()) == n_top);
    for (int i = 0; i < n_top; ++i) {
      CHECK(s.top[size_t(i)].token == order[size_t(i)]);
      CHECK(s.top[size_t(i)].logprob == Approx(double(logits[size_t(order[size_t(i)])]) - std::log(sum)).margin(1e-5));
    }
  }
  SamplingParams all{.temperature = 0, .top_logprobs = 20};  // more than the vocabulary has
  SamplerState state(all, 0, {});
  SamplerScratch scratch;
  const Sampled tied = sample(std::vector<float>{1, 2, 2, 1}, all, state, scratch);
  REQUIRE(tied.top.size() == 4);
  CHECK((tied.top[0].token == 1 && tied.top[1].token == 2 && tied.top[2].token == 0 && tied.top[3].token == 3));
}

TEST_CASE("sampler: any logits give a token", "[model][sampler]") {
  SamplerScratch scratch;
  for (float temperature : {0.0f, 1.0f})
    for (float top_p : {1.0f, 0.5f})
      for (int top_k : {0, 2})
        for (float penalty : {1.0f, 1.5f}) {
          SamplingParams params{.temperature = temperature,
                                .top_k = top_k,
                                .top_p = top_p,
                                .repetition_penalty = penalty,
                                .top_logprobs = 2};
          CAPTURE(temperature, top_p, top_k, penalty);
          auto run = [&](const std::vector<float>& logits) {
            SamplerState state(params, 0, std::vector<int32_t>{0, 1, 2});
            return sample(logits, params, state, scratch);
          };
          Sampled nan = run({NAN, 1, NAN, -kInf});
          CHECK(nan.chosen.token == 1);
          CHECK(nan.chosen.logprob == 0);
          CHECK_FALSE(nan.finite);
          Sampled nothing = run({NAN, -kInf, -kInf});
          CHECK(nothing.chosen.token == 0);
          CHECK_FALSE(run({-kInf, -kInf}).finite);
          CHECK(nothing.chosen.logprob == -kInf);
          Sampled infinite = run({0, 3, kInf, 5});
          CHECK(infinite.chosen.token == 2);
          CHECK(infinite.chosen.logprob == 0);
          CHECK_FALSE(infinite.finite);
          CHECK(run({-kInf, 3e38f}).finite);
          CHECK(run({-3e38f, 3e38f}).chosen.token == 1);
          CHECK(run({7}).chosen.token == 0);
        }
}

TEST_CASE("sampler: each seed and choice has its own stream, which a moved state continues", "[model][sampler]") {
  const auto logits = random_logits(500, 3, 1);
  auto stream = [&](uint64_t seed, int choice) {
    SamplingParams params{.seed = seed};
    SamplerState state(params, choice, {});
    SamplerScratch scratch;
    std::vector<int> tokens;
    for (int i = 0; i < 30; ++i) {
      SamplerState moved = state;  // a plain value continues where it was
      tokens.push_back(sample(logits, params, moved, scratch).chosen.token);
      state = std::move(moved);
    }
    return tokens;
  };
  CHECK(stream(1, 0) == stream(1, 0));
  CHECK(stream(1, 0) != stream(2, 0));
  CHECK(stream(1, 0) != stream(1, 1));
  CHECK(stream(1, 1) != stream(2, 0));  // the stream is not that of seed + choice
}

}  // namespace xpyd::testing::sampler_test
