// mpu and dcp, each by hand: what they decide, and how soon.
#include <algorithm>

#include "batch/chunk_policy.h"
#include "tests/catch.h"

namespace xpyd::testing::chunk_adaptive_test {
namespace {

struct Asked {
  const char* policy;
  ChunkView view;
  ChunkState state = {};
  std::vector<ChunkPrompt> prompts = {};
  std::vector<int> in_flight = {};

  ChunkChoice choose(std::vector<int> left) {
    prompts.clear();
    for (size_t i = 0; i < left.size(); ++i) prompts.push_back({i + 1, 0, left[i]});
    view.prompts = prompts, view.in_flight = in_flight;
    if (view.base == 0) view.base = view.budget;
    ChunkChoice choice;
    choose_chunks(*find_chunk_policy(policy), view, state, choice);
    state = choice.state;
    return choice;
  }
  int budget(std::vector<int> left) {
    const int tokens = choose(std::move(left)).step_tokens;
    return state.level >= 0 ? view.budget >> state.level : tokens;  // mpu's wave may take a last piece besides
  }
};

constexpr int kM = 16384;

// WavePP's own numbers: M = 16384, b_min = 8192, four stages: a ring of 8, and 12 waves wanted.
Asked mpu(int minimum = 8192) { return {"mpu", {.budget = kM, .minimum = minimum, .block_tokens = 64, .stages = 4}}; }

TEST_CASE("mpu: the largest budget that fills the ring", "[chunks]") {
  CHECK(mpu().budget({12 * kM}) == kM);
  CHECK(mpu().budget({12 * kM - 64}) == kM / 2);
  CHECK(mpu().budget({100}) == kM / 2);    // b_min
  CHECK(mpu(2048).budget({100}) == 2048);  // three halvings
  CHECK(mpu(2048).budget({12 * kM / 4}) == kM / 4);
  // Pieces of more than half a wave need a wave each: 12 of them are 6 M tokens, and 12 waves.
  CHECK(mpu().budget(std::vector<int>(12, kM / 2 + 1)) == kM);
  CHECK(mpu().budget(std::vector<int>(24, kM / 4)) == kM / 2);
  // What is still in the ring counts.
  Asked ring = mpu();
  ring.in_flight = {kM, kM, kM, kM};
  CHECK(ring.budget({8 * kM}) == kM);
  ring.in_flight.assign(12, kM / 2 + 1);
  CHECK(Asked{ring.policy, ring.view, {}, {}, ring.in_flight}.budget({100}) == kM);
  ring.in_flight.assign(12, kM / 2);  // two of which share a wave
  CHECK(Asked{ring.policy, ring.view, {}, {}, ring.in_flight}.budget({100}) == kM / 2);
  // Eight stages fill less: 2 P waves.
  Asked eight = mpu();
  eight.view.stages = 8;
  CHECK(eight.budget({16 * kM}) == kM);
  CHECK(eight.budget({16 * kM - 64}) == kM);  // and a smaller one has to wait for its turn
}

TEST_CASE("mpu: where every stage has work, thinning cuts an eighth of the tokens at most", "[chunks]") {
  CHECK(mpu().budget({kM, kM, kM, kM, kM, kM}) == kM);               // six waves would become twelve halves
  CHECK(mpu().budget({kM, kM, kM}) == kM / 2);                       // three leave a stage idle
  CHECK(mpu().budget({kM / 2, kM / 2, 6 * kM - kM}) == kM / 2);      // nothing is cut anew
  CHECK(mpu().budget({kM * 3 / 4, 6 * kM - kM * 3 / 4}) == kM / 2);  // 12.5 % are
  CHECK(mpu().budget({kM * 3 / 4 + 1, 6 * kM - kM * 3 / 4 - 1}) == kM);
}

TEST_CASE("mpu: a step up after R/2 decisions, down after R, a burst at once", "[chunks]") {
  Asked asked = mpu(2048);
  CHECK(asked.budget({12 * kM / 2}) == kM / 2);
  for (int i = 1; i < 4; ++i) CHECK(asked.budget({12 * kM}) == kM / 2);
  CHECK(asked.budget({12 * kM}) == kM);
  for (int i = 1; i < 8; ++i) CHECK(asked.budget({12 * kM / 2}) == kM);
  CHECK(asked.budget({12 * kM / 2}) == kM / 2);
  for (int i = 1; i < 8; ++i) CHECK(asked.budget({10000}) == kM / 2);
  CHECK(asked.budget({12 * kM / 2}) == kM / 2);  // one that wants nothing else: the count begins again
  for (int i = 1; i < 8; ++i) CHECK(asked.budget({10000}) == kM / 2);
  CHECK(asked.budget({10000}) == kM / 4);
  CHECK(asked.budget({12 * kM}) == kM);  // two steps
}

TEST_CASE("mpu: no fragment is left, and a lone short wave waits once for a mate", "[chunks]") {
  CHECK(mpu().choose({kM / 2 + 1000}).most == std::vector{kM / 2 + 1000});
  CHECK(mpu().choose({kM + 1000}).most == std::vector{kM / 2});
  Asked asked = mpu();
  CHECK(asked.choose({1000}).most == std::vector{1000});  // nothing is under way: why wait
  asked.in_flight = {5000};
  CHECK(asked.choose({1000}).most == std::vector{0});
  CHECK(asked.choose({1000}).most == std::vector{1000});
  CHECK(asked.choose({1000}).most == std::vector{0});
  CHECK(asked.choose({1000, 1000}).most == std::vector{1000, 1000});
  CHECK(asked.choose({kM / 4}).most == std::vector{kM / 4});  // half a wave
}

Asked dcp(const char* policy) {
  return {policy, {.budget = 2048, .minimum = 512, .block_tokens = 16, .stages = 4, .window = 4}};
}

TEST_CASE("dcp_greedy: by memory, by the gap between tokens, by the time that a prompt has", "[chunks]") {
  const auto after = [](ChunkView changes, int chunk) {
    Asked asked = dcp("dcp_greedy");
    asked.view = changes;
    asked.state = {.chunk = chunk, .since = changes.stages};
    return asked.budget({50000});
  };
  ChunkView view = dcp("dcp_greedy").view;
  CHECK(Asked{"dcp_greedy", view}.budget({50000}) == 2048);
  view.decodes = 200;
  view.kv_free = 0.05;
  CHECK(after(view, 2048) == 256);  // 128 are fewer than run
  view.decodes = 250;
  CHECK(after(view, 2048) == 512);  // 256 would leave prompts six
  view.decodes = 200;
  view.kv_free = 0.5;
  view.tbt_s = 0.1, view.gap_s = 0.11;
  CHECK(after(view, 1024) == 512);
  CHECK(after(view, 256) == 256);
  view.gap_s = 0.09;  // kept, and not with ease
  CHECK(after(view, 1024) == 1024);
  view.gap_s = 0.05;
  CHECK(after(view, 1024) == 2048);
  CHECK(after(view, 2048) == 2048);
  view.ttft_s = 2, view.slack_s = 1.5;  // a prompt that has time gives some
  CHECK(after(view, 1024) == 512);
  view.slack_s = 0.8;
  CHECK(after(view, 1024) == 1024);
  view.slack_s = 0.4;
  CHECK(after(view, 1024) == 2048);
  view.slack_s = -1, view.gap_s = 0.2;
  CHECK(after(view, 1024) == 512);  // the gap comes first
}

TEST_CASE("dcp_predictive: the smallest chunk that is fast enough, or the largest that keeps the gap", "[chunks]") {
  // One sequence decodes; t = 10 ms + 0.1 ms a token: 127 tokens in 22.7 ms are 5595 a second, and so on:
  // 255: 7183, 511: 8363 (61.1 ms), 1023: 9110 (112.3 ms), 2047: 9534 (214.7 ms).
  ChunkView view{.decodes = 1, .budget = 2048, .minimum = 512, .block_tokens = 16};
  view.cost = {0.01, 1e-4, 0, 0, 0, 0};
  const auto chosen = [](const ChunkView& v) { return Asked{"dcp_predictive", v}.budget({1000, 5000}); };
  CHECK(chosen(view) == 128);
  view.arrival_tokens_s = 6000;
  CHECK(chosen(view) == 256);
  view.arrival_tokens_s = 8000;
  CHECK(chosen(view) == 512);
  view.tbt_s = 0.05;  // 512 would take longer: overloaded
  CHECK(chosen(view) == 256);
  view.window = 2;  // and a sequence decodes in every other wave
  CHECK(chosen(view) == 128);
  view.window = 1, view.tbt_s = 0, view.arrival_tokens_s = 0;
  view.ttft_s = 1, view.slack_s = 0.15;  // 1000 tokens in 0.15 s
  CHECK(chosen(view) == 256);
  view.stages = 2;  // of which the second stage takes some
  CHECK(chosen(view) == 2048);
  view.stages = 1, view.slack_s = -1;
  CHECK(chosen(view) == 2048);
  view.tbt_s = 0.2;
  CHECK(chosen(view) == 1024);
}

TEST_CASE("dcp: the chunk changes in every P-th decision alone", "[chunks]") {
  for (const char* policy : {"dcp_greedy", "dcp_predictive"}) {
    Asked asked = dcp(policy);
    asked.view.decodes = 1;
    asked.view.cost = {0.01, 1e-4, 0, 0, 0, 0};
    std::vector<int> chunks;
    for (int i = 0; i < 64; ++i) {
      // Every decision sees another world.
      asked.view.tbt_s = 0.4, asked.view.gap_s = i % 3 ? 0.5 : 0.1;
      asked.view.arrival_tokens_s = 1500.0 * (i % 7);
      chunks.push_back(asked.budget({50000}));
      if (i % 4 != 0) CHECK(chunks[size_t(i)] == chunks[size_t(i) - 1]);
    }
    std::ranges::sort(chunks);
    CHECK(std::unique(chunks.begin(), chunks.end()) - chunks.begin() >= 3);
    asked.state = {.chunk = 128, .since = 1};
    asked.view.decodes = 112;
    CHECK(asked.budget({50000}) == 128);
    asked.view.decodes = 127;  // one token for prompts
    CHECK(asked.budget({50000}) >= 256);
  }
}

}  // namespace
}  // namespace xpyd::testing::chunk_adaptive_test
