// Rules that every chunk policy keeps, whatever waits; fixed and equal_time by hand; and equal_time beside the best of
// all cuts.
#include "batch/chunking/chunk_policy.h"

#include <algorithm>
#include <climits>
#include <map>
#include <string>

#include "base/random.h"
#include "experiments/chunk_oracle.h"
#include "tests/catch.h"

namespace xpyd::testing::chunk_policy_test {
namespace {

struct ChunkScene {
  std::vector<ChunkPrompt> prompts;
  ChunkView view;
  ChunkState state;
  ChunkScene(std::vector<ChunkPrompt> p, ChunkView v) : prompts(std::move(p)), view(v) {
    if (view.base == 0) view.base = view.budget;
    for (size_t i = 0; i < prompts.size(); ++i)
      if (prompts[i].id == 0) prompts[i].id = i + 1;
  }
  // Returns the choice for the next step, without taking it.
  ChunkChoice choose(const char* policy) {
    view.prompts = prompts;
    ChunkChoice choice;
    const ChunkPolicy* row = find_chunk_policy(policy);
    choose_chunks(row ? *row : experiments::kChunkOracle, view, state, choice);
    return choice;
  }
  // Takes the next step. Returns the pieces of the prompts in order, with their places; empty pieces are left out.
  std::vector<ChunkPrompt> step(const char* policy) {
    const ChunkChoice choice = choose(policy);
    state = choice.state;
    std::vector<ChunkPrompt> pieces;
    int room = choice.step_tokens - view.decodes;
    for (size_t i = 0; i < prompts.size() && room > 0; ++i) {
      ChunkPrompt& p = prompts[i];
      const int n = std::min({choice.most[i], p.left, room});
      if (n <= 0) break;
      pieces.push_back({p.id, p.done, n});
      p.done += n, p.left -= n, room -= n;
    }
    std::erase_if(prompts, [](const ChunkPrompt& p) { return p.left == 0; });
    return pieces;
  }
  double seconds_of(const std::vector<ChunkPrompt>& pieces) const {
    StepShape shape;
    shape.add_decodes(view.decodes, view.decode_context);
    for (const ChunkPrompt& p : pieces) shape.add_prompt(p.left, p.done);
    return seconds(view.cost, shape);
  }
  // Plays to the end, and returns the time that P stages take.
  double makespan(const char* policy, std::vector<double>* waves = nullptr) {
    double sum = 0, longest = 0;
    while (!prompts.empty()) {
      const double s = seconds_of(step(policy));
      sum += s, longest = std::max(longest, s);
      if (waves) waves->push_back(s);
    }
    return sum + (view.stages - 1) * longest;
  }
};

std::vector<int> tokens(const std::vector<ChunkPrompt>& pieces) {
  std::vector<int> all;
  for (const ChunkPrompt& p : pieces) all.push_back(p.left);
  return all;
}
using Tokens = std::vector<int>;

TEST_CASE("chunks: fixed changes nothing until an option asks for it", "[chunks]") {
  ChunkScene scene({{.left = 5000}, {.left = 5}}, {.decodes = 3, .budget = 512, .block_tokens = 16});
  CHECK(scene.choose("fixed").step_tokens == 512);
  CHECK(scene.choose("fixed").most == Tokens{INT_MAX, INT_MAX});
  CHECK(chunk_minimum(*find_chunk_policy("fixed"), 0, 512, 16) == 0);
  scene.view.base = 100;  // a request's chunk and the step's budget are two things
  CHECK(scene.choose("fixed").step_tokens == 512);
  CHECK(scene.choose("fixed").most == Tokens{100, 100});
  CHECK(chunk_minimum(*find_chunk_policy("equal_time"), 0, 512, 16) == 128);
  CHECK(chunk_minimum(*find_chunk_policy("fixed"), 20, 512, 16) == 32);
}

TEST_CASE("chunks: a last piece that is too small joins the one before, or both are evened out", "[chunks]") {
  ChunkScene scene({{.left = 210}}, {.budget = 100, .minimum = 20});
  CHECK(tokens(scene.step("fixed")) == Tokens{100});
  CHECK(tokens(scene.step("fixed")) == Tokens{55});  // and not 100 and 10
  CHECK(tokens(scene.step("fixed")) == Tokens{55});
}

TEST_CASE(
    "chunks: a prompt that would get less than the minimum of a wave waits for the next one, and a short prompt does "
    "not",
    "[chunks]") {
  const ChunkView view{.budget = 100, .minimum = 20, .block_tokens = 10};
  CHECK(tokens(ChunkScene({{.left = 85}, {.left = 300}}, view).step("fixed")) == Tokens{85});
  CHECK(tokens(ChunkScene({{.left = 75}, {.left = 300}}, view).step("fixed")) == Tokens{75, 20});
  CHECK(tokens(ChunkScene({{.left = 85}, {.left = 10}, {.left = 300}}, view).step("fixed")) == Tokens{85, 10});
  ChunkScene many({{.left = 300}, {.left = 300}, {.left = 30}, {.left = 300}, {.left = 300}},
                  {.budget = 200, .base = 50, .minimum = 20, .block_tokens = 10});
  CHECK(tokens(many.step("fixed")) == Tokens{50, 50, 30, 50, 20});
}

TEST_CASE("chunks: a policy that predicts says when its cost has seen nothing like the prompt", "[chunks]") {
  ChunkScene scene({{.done = 1000, .left = 1000}},
                   {.budget = 512, .minimum = 64, .cost = {1e-3, 1e-5, 0, 1e-9, 0, 0}, .steps_seen = 8});
  scene.view.longest_prefix = 1000, scene.view.longest_chunk = 256;
  CHECK_FALSE(scene.choose("equal_time").extrapolates);
  scene.view.steps_seen = 7;
  CHECK(scene.choose("equal_time").extrapolates);
  CHECK_FALSE(scene.choose("fixed").extrapolates);
  scene.view.steps_seen = 8;
  scene.view.longest_chunk = 20;  // the least chunk is 64 here
  CHECK(scene.choose("equal_time").extrapolates);
  scene.view.longest_chunk = 256, scene.view.longest_prefix = 200;  // twice 456 is less than 1000
  CHECK(scene.choose("equal_time").extrapolates);
  scene.view.steps_seen = kGivenSteps, scene.view.longest_prefix = scene.view.longest_chunk = 0;
  CHECK_FALSE(scene.choose("equal_time").extrapolates);
}

TEST_CASE("chunks: equal_time finds the number of waves that takes least time", "[chunks]") {
  // n waves of 100 tokens take n c + 100 b + (P - 1)(c + 100 b / n), which is least at n = sqrt(100 (P - 1) b / c).
  ChunkView view{.budget = 100, .minimum = 5, .stages = 2, .cost = {1, 1, 0, 0, 0, 0}, .steps_seen = kGivenSteps};
  ChunkScene two({{.left = 100}}, view);
  CHECK(tokens(two.step("equal_time")) == Tokens{10});
  CHECK(two.makespan("equal_time") == 9 * 11 + 11);  // the rest of the prompt is cut in the same way
  CHECK(ChunkScene({{.left = 100}}, view).makespan("equal_time") == 121);
  view.stages = 5;  // n = 20
  CHECK(tokens(ChunkScene({{.left = 100}}, view).step("equal_time")) == Tokens{5});
  CHECK(ChunkScene({{.left = 100}}, view).makespan("equal_time") == 120 + 4 * 6);
  view.stages = 1;  // no pipeline to fill: one wave
  CHECK(tokens(ChunkScene({{.left = 100}}, view).step("equal_time")) == Tokens{100});
  // Several prompts are one stream: a wave goes on with the next prompt while there is time.
  view.stages = 2;
  CHECK(tokens(ChunkScene({{.left = 4}, {.left = 96}}, view).step("equal_time")) == Tokens{4, 6});
  ChunkScene late({{.left = 7}, {.left = 93}}, view);
  late.state = {.head = 1, .wave_s = 11};               // chosen when the prompt was alone
  CHECK(tokens(late.step("equal_time")) == Tokens{7});  // 3 of the next one would be less than the minimum
}

TEST_CASE("chunks: the search of equal_time ends with more prompts than it looks at", "[chunks]") {
  // The search once never ended, because no wave of the minimum could begin at its last stops.
  for (int n : {1, 3, 15, 16, 17, 40})
    for (int minimum : {512, 2048, 3000}) {
      ChunkView view{.budget = 8192, .minimum = minimum, .block_tokens = 512, .stages = 8, .steps_seen = kGivenSteps};
      view.cost = {5.75e-3, 40.6e-6, 1.5e-9, 0.375e-9, 0, 0};
      ChunkScene scene(std::vector<ChunkPrompt>(size_t(n), ChunkPrompt{.left = 131072}), view);
      const auto pieces = scene.step("equal_time");
      REQUIRE(!pieces.empty());
      CHECK(pieces[0].left <= 8192);
    }
}

TEST_CASE("chunks: the waves of equal_time take equally long", "[chunks]") {
  for (int stages : {2, 4, 8}) {
    ChunkScene scene({{.left = 131072}}, {.budget = 8192,
                                          .minimum = 256,
                                          .block_tokens = 64,
                                          .stages = stages,
                                          .cost = {5e-3, 3e-5, 1e-8, 3e-10, 0, 0},
                                          .steps_seen = kGivenSteps});
    int n = 0, last = INT_MAX;
    while (!scene.prompts.empty()) {
      const int left = scene.prompts[0].left;
      const std::vector<ChunkPrompt> pieces = scene.step("equal_time");
      const int x = pieces[0].left;
      INFO("P " << stages << " after " << pieces[0].done << ": " << x << " of " << left);
      if (left - x > 256 && x < 8192) {
        CHECK(scene.seconds_of(pieces) <= scene.state.wave_s * (1 + 1e-6));
        CHECK(scene.seconds_of({{1, pieces[0].done, x + 64}}) > scene.state.wave_s);
        CHECK(x <= last);  // later tokens cost more
        last = x;
      }
      ++n;
    }
    CHECK(n > 2 * stages);
  }
}

// Tries every way to cut the prompt at multiples of the block, and returns the least time.
double brute_force(const ChunkScene& scene, int done, int left, double sum, double longest) {
  if (left == 0) return sum + (scene.view.stages - 1) * longest;
  double best = 1e300;
  for (int x = 1; x <= std::min(left, scene.view.base); ++x) {
    if (x < left && ((done + x) % scene.view.block_tokens != 0 || left - x < scene.view.minimum)) continue;
    if (x < left && x < scene.view.minimum) continue;
    const double s = scene.seconds_of({{1, done, x}});
    best = std::min(best, brute_force(scene, done + x, left - x, sum + s, std::max(longest, s)));
  }
  return best;
}

struct Costs {
  Random random;
  double up_to(double x) { return random.uniform() * x; }
  int below(int n) { return int(random.below(uint64_t(n))); }
  StepCost::Terms terms() { return {up_to(1e-2), 1e-6 + up_to(1e-4), up_to(1e-7), up_to(1e-8), 0, 0}; }
};

TEST_CASE("chunks: dp_oracle finds the best of all cuts", "[chunks]") {
  Costs costs{Random(7)};
  for (int i = 0; i < 400; ++i) {
    const int block = 1 << costs.below(5);
    ChunkScene scene({{.done = block * costs.below(300), .left = 2 + costs.below(14 * block)}},
                     {.budget = block * (4 + costs.below(12)),
                      .minimum = block * (1 + costs.below(2)),
                      .block_tokens = block,
                      .stages = 1 + costs.below(8),
                      .cost = costs.terms(),
                      .steps_seen = kGivenSteps});
    const ChunkPrompt p = scene.prompts[0];
    const double best = brute_force(scene, p.done, p.left, 0, 0);
    INFO(i << ": " << p.left << " after " << p.done << ", block " << block << ", " << scene.view.budget << " at most, "
           << scene.view.minimum << " at least, P " << scene.view.stages);
    ChunkScene other = scene;
    const double found = scene.makespan("dp_oracle"), equal = other.makespan("equal_time");
    CHECK(found > best * (1 - 1e-9));
    CHECK(found < best * (1 + 1e-4));
    CHECK(equal > best * (1 - 1e-9));
  }
}

// Every policy plays random scenes to their end.
TEST_CASE("chunks: every prompt ends, in blocks and in order, without pieces below the minimum", "[chunks]") {
  Costs costs{Random(3)};
  for (const ChunkPolicy& policy : chunk_policies())
    for (int i = 0; i < 300; ++i) {
      const int block = 1 << costs.below(7);
      ChunkView view{.decodes = costs.below(40),
                     .decode_context = 1000,
                     .budget = 200 + costs.below(4000),
                     .block_tokens = block,
                     .stages = 1 + costs.below(8),
                     .cost = costs.terms(),
                     .steps_seen = kGivenSteps};
      view.base = costs.below(2) ? view.budget : 130 + costs.below(view.budget - 130);
      view.minimum = chunk_minimum(policy, costs.below(2) * (1 + costs.below(300)), view.base, block);
      ChunkScene scene({}, view);
      for (int n = 1 + costs.below(6); n > 0; --n)
        scene.prompts.push_back({uint64_t(n), block * costs.below(9), 2 + costs.below(costs.below(2) ? 300 : 9000)});
      std::map<uint64_t, int> whole, seen;
      for (const ChunkPrompt& p : scene.prompts) whole[p.id] = p.left;
      const int room = view.budget - view.decodes, half = std::min(room, view.base) / 2;
      const int least = std::min(view.minimum, half);
      const int in_blocks = least >= block ? least / block * block : least;
      for (int steps = 0; !scene.prompts.empty(); ++steps) {
        INFO(policy.name << " " << i << " step " << steps << " block " << block << " budget " << view.budget << " base "
                         << view.base << " minimum " << view.minimum << " decodes " << view.decodes);
        REQUIRE(steps < 5000);
        const std::vector<ChunkPrompt> before = scene.prompts;
        const ChunkChoice choice = scene.choose(policy.name);
        REQUIRE(choice.step_tokens <= view.budget);
        REQUIRE(choice.step_tokens >= 1);
        const std::vector<ChunkPrompt> pieces = scene.step(policy.name);
        REQUIRE(!pieces.empty());
        int total = 0;
        for (size_t k = 0; k < pieces.size(); ++k) {
          const ChunkPrompt& p = pieces[k];
          CHECK(p.id == before[k].id);  // no prompt is overtaken
          CHECK(p.left <= view.base);
          const bool ends = p.left == before[k].left;
          if ((policy.shapes || view.minimum > 0) && p.left < whole[p.id]) CHECK(p.left >= in_blocks);
          if (!ends && (policy.shapes || view.minimum > 0) && in_blocks >= block) CHECK((p.done + p.left) % block == 0);
          total += p.left;
          seen[p.id] += p.left;
        }
        CHECK(total <= room);
      }
      CHECK(seen == whole);
    }
}

}  // namespace
}  // namespace xpyd::testing::chunk_policy_test
