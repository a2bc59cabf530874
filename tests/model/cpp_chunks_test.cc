#include "experiments/cpp_chunks.h"

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::cpp_chunks_test {
namespace {

using namespace experiments;

const ChunkCost kCost{.stage_s = 5e-4, .c = 0.04, .b = 3.2e-4, .g = 1e-7, .a = 3e-9};

TEST_CASE("chunks: they tile a prompt, and equal-time ones take as long each", "[pipeline]") {
  Random random(7);
  for (int trial = 0; trial < 100; ++trial) {
    const double cached = double(random.below(100000)), tokens = double(1 + random.below(100000));
    const int stages = 1 + int(random.below(8));
    const double T = 0.1 + random.uniform();
    for (const ChunkRule& rule :
         {fixed_chunks(2048), sglang_chunks(kCost, 8192, .75), equal_time_chunks(kCost, T, stages)}) {
      double at = cached;
      for (const Chunk& chunk : cut(cached, tokens, rule)) {
        CHECK(chunk.L == at);
        CHECK(chunk.x > 0);
        at += chunk.x;
      }
      CHECK(at == cached + tokens);
    }
    const double x = kCost.tokens(cached, T, stages);
    if (x > 0) CHECK(kCost.seconds(cached, x, stages) == Approx(T).epsilon(1e-9));
  }
}

TEST_CASE("chunks: SGLang's begin with the base, shrink, and stop at a quarter of it", "[pipeline]") {
  const std::vector<Chunk> chunks = cut(0, 1 << 20, sglang_chunks(kCost, 8192, 1));
  CHECK(chunks.front().x == 8192);
  CHECK(chunks[1].x < 8192);
  CHECK(chunks[chunks.size() - 2].x == 2048);
  CHECK(cut(0, 65536, sglang_chunks(kCost, 8192, 0)).size() == 8);
}

TEST_CASE("chunks: the best equal-time ones end before any fixed ones", "[pipeline]") {
  for (double tokens : {8192., 131072.}) {
    const auto end = [&](const std::vector<Chunk>& chunks) {
      return model::pipeline_seconds(stage_seconds(kCost, chunks, 8), 8);
    };
    const double best = end(best_equal_time(kCost, 0, tokens, 8));
    for (double x = 256; x <= tokens; x *= 2) CHECK(best <= end(cut(0, tokens, fixed_chunks(x))));
  }
}

TEST_CASE("chunks: a ring in slots, by hand", "[pipeline]") {
  // Two stages, 1 then 3: slots of 1, 3, 3. Twice: 1, 3, 3, 3, 3.
  CHECK(in_slots({1, 3}, 2, 1) == 7);
  CHECK(in_slots({1, 3}, 2, 2) == 13);
  CHECK(in_slots({2, 2, 2}, 3, 1) == 10);
}

TEST_CASE("chunks: as many in flight as stages are a ring in slots, where chunks grow", "[pipeline]") {
  Random random(11);
  for (int trial = 0; trial < 200; ++trial) {
    const int stages = 1 + int(random.below(8)), queued = 1 + int(random.below(5));
    std::vector<double> seconds(size_t(stages) + random.below(12));
    for (double& t : seconds) t = 0.1 + random.uniform();
    if (trial % 2) std::ranges::sort(seconds);
    std::vector<model::PipelineChunk> chunks;
    for (int i = 0; i < queued; ++i)
      for (double t : seconds) chunks.push_back({std::vector<double>(size_t(stages), t)});
    const double ring = in_slots(seconds, stages, queued), window = model::pipeline_times(chunks, stages).end();
    CHECK(window <= ring * (1 + 1e-12));
    if (trial % 2) CHECK(window == Approx(ring).epsilon(1e-12));
  }
}

}  // namespace
}  // namespace xpyd::testing::cpp_chunks_test
