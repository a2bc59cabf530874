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
    for (const ChunkRule& rule : {fixed_chunks(2048), equal_time_chunks(kCost, T, stages)}) {
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

TEST_CASE("chunks: the best equal-time ones end before any fixed ones", "[pipeline]") {
  for (double tokens : {8192., 131072.}) {
    const auto end = [&](const std::vector<Chunk>& chunks) {
      return model::pipeline_seconds(stage_seconds(kCost, chunks, 8), 8);
    };
    const double best = end(best_equal_time(kCost, 0, tokens, 8));
    for (double x = 256; x <= tokens; x *= 2) CHECK(best <= end(cut(0, tokens, fixed_chunks(x))));
  }
}

}  // namespace
}  // namespace xpyd::testing::cpp_chunks_test
