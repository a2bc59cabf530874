#include "model/pipeline_time.h"

#include <algorithm>
#include <optional>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::pipeline_time_test {
namespace {

using namespace model;
using Chunks = std::vector<PipelineChunk>;

Chunks same_on_all(std::span<const double> seconds, int n_stages) {
  Chunks chunks;
  for (double t : seconds) chunks.push_back({std::vector<double>(size_t(n_stages), t)});
  return chunks;
}

// Whole ticks, one after another: a stage that is idle takes its next chunk if that is there. done[i][s] in ticks.
std::vector<std::vector<int>> by_ticks(const Chunks& chunks, int window) {
  const size_t n = chunks.size(), P = chunks[0].stage_s.size();
  std::vector<std::vector<int>> done(n, std::vector<int>(P, -1));
  std::vector<size_t> next(P, 0);            // the chunk that a stage takes next
  std::vector<std::optional<int>> until(P);  // when it ends what it has
  for (int now = 0; done[n - 1][P - 1] < 0; ++now) {
    bool moved = true;
    while (moved) {  // a chunk of no time passes within a tick
      moved = false;
      for (size_t s = 0; s < P; ++s) {
        if (until[s] == now) {
          done[next[s]++][s] = now;
          until[s].reset();
          moved = true;
        }
        const size_t i = next[s];
        if (until[s] || i == n) continue;
        const size_t ended = next[P - 1];  // chunks that have left
        const bool here = s > 0 ? done[i][s - 1] >= 0 && done[i][s - 1] + chunks[i].boundary_s <= now
                                : chunks[i].arrival_s <= now && (window == 0 || i < ended + size_t(window));
        if (!here) continue;
        until[s] = now + int(chunks[i].stage_s[s]);
        moved = true;
      }
    }
  }
  return done;
}

TEST_CASE("pipeline time: the closed form is the recurrence, for the same time on all stages", "[pipeline]") {
  Random random(3);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<double> seconds(1 + random.below(60));
    for (double& t : seconds) t = trial % 3 == 0 ? random.exponential() : 0.01 + random.uniform();
    const int n_stages = 1 + int(random.below(16));
    const PipelineTimes times = pipeline_times(same_on_all(seconds, n_stages), 0);
    CHECK(times.end() == Approx(pipeline_seconds(seconds, n_stages)).epsilon(1e-12));
  }
}

TEST_CASE("pipeline time: as stages do that look at their inputs tick by tick", "[pipeline]") {
  Random random(5);
  for (int trial = 0; trial < 400; ++trial) {
    const size_t P = 1 + random.below(6);
    const int window = int(random.below(2 * P + 2));
    Chunks chunks(1 + random.below(20));
    int arrival = 0;
    for (PipelineChunk& chunk : chunks) {
      for (size_t s = 0; s < P; ++s) chunk.stage_s.push_back(double(random.below(9)));
      chunk.boundary_s = double(random.below(4));
      chunk.arrival_s = arrival += trial % 2 ? int(random.below(12)) : 0;
    }
    const PipelineTimes times = pipeline_times(chunks, window);
    const auto done = by_ticks(chunks, window);
    for (size_t i = 0; i < chunks.size(); ++i)
      for (size_t s = 0; s < P; ++s) {
        INFO("trial " << trial << ", window " << window << ", chunk " << i << ", stage " << s);
        REQUIRE(times.left(int(i), int(s)) == done[i][s]);
        REQUIRE(times.left(int(i), int(s)) - times.begun(int(i), int(s)) == chunks[i].stage_s[s]);
      }
  }
}

TEST_CASE("pipeline time: windows by hand", "[pipeline]") {
  const Chunks three = same_on_all(std::vector<double>{1, 1, 1}, 2);
  CHECK(pipeline_times(three, 0).end() == 4);
  CHECK(pipeline_times(three, 1).end() == 6);  // one in flight: 3 x 2, nothing overlaps
  CHECK(pipeline_times(three, 2).end() == 4);  // as many as stages, alike and without a boundary: it costs nothing
  CHECK(pipeline_times({}, 2).end() == 0);
}

TEST_CASE("pipeline time: lockstep, as many chunks as stages, by hand", "[pipeline]") {
  // Two stages; a long chunk, then a short one, twice. Unbounded: 0..4 | 4..5 | 5..9 | 9..10 on stage 0, and 4..8
  // | 8..9 | 9..13 | 13..14 on stage 1. With two in flight the third waits for the first (8) and the fourth for the
  // second (9): stage 0 has 0..4 | 4..5 | 8..12 | 12..13, stage 1 4..8 | 8..9 | 12..16 | 16..17.
  const Chunks mixed = same_on_all(std::vector<double>{4, 1, 4, 1}, 2);
  CHECK(pipeline_times(mixed, 0).end() == 14);
  const PipelineTimes two = pipeline_times(mixed, 2);
  CHECK(two.begun(2, 0) == 8);
  CHECK(two.end() == 17);
  CHECK(pipeline_times(mixed, 3).end() == 14);
  // Chunks of one prompt only grow: the first has left before the window asks for it.
  const Chunks growing = same_on_all(std::vector<double>{1, 2, 3, 4, 5, 6}, 3);
  CHECK(pipeline_times(growing, 3).end() == pipeline_times(growing, 0).end());
  // A boundary of half a chunk: with as many in flight as stages every round of three pays two of them.
  Chunks far = same_on_all(std::vector<double>{1, 1, 1, 1, 1, 1}, 3);
  for (PipelineChunk& chunk : far) chunk.boundary_s = 0.5;
  CHECK(pipeline_times(far, 0).end() == 9);
  CHECK(pipeline_times(far, 3).end() == 10);
  CHECK(pipeline_times(far, 4).end() == 9);
}

TEST_CASE("pipeline time: the slowest stage sets the rate", "[pipeline]") {
  const Chunks chunks(10, {.stage_s = {1, 2, 1}});
  CHECK(pipeline_times(chunks, 0).end() == 1 + 10 * 2 + 1);
}

}  // namespace
}  // namespace xpyd::testing::pipeline_time_test
