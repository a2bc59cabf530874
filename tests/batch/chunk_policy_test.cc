// Rules that every chunk policy keeps, whatever waits; and equal_time by hand.
#include "batch/chunking/chunk_policy.h"

#include <algorithm>
#include <climits>
#include <map>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::chunk_policy_test {

// Asks for all the room of the step, so that the rules by which a wave is filled decide alone.
constexpr ChunkPolicy kAllRoom = {"all_room",
                                  [](const ChunkView& view, ChunkState state, int& wave_tokens) {
                                    wave_tokens = prompt_room(view);
                                    return state;
                                  },
                                  ""};

struct ChunkScene {
  std::vector<ChunkPrompt> prompts;
  ChunkView view;
  ChunkState state;
  ChunkScene(std::vector<ChunkPrompt> p, ChunkView v) : prompts(std::move(p)), view(v) {
    for (size_t i = 0; i < prompts.size(); ++i)
      if (prompts[i].id == 0) prompts[i].id = i + 1;
  }
  // Returns the choice for the next step, without taking it.
  ChunkChoice choose(const ChunkPolicy& policy) {
    view.prompts = prompts;
    ChunkChoice choice;
    choose_chunks(policy, view, state, choice);
    return choice;
  }
  // Takes the next step. Returns the pieces of the prompts in order, with their places; empty pieces are left out.
  std::vector<ChunkPrompt> step(const ChunkPolicy& policy) {
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
  double makespan(const ChunkPolicy& policy) {
    double sum = 0, longest = 0;
    while (!prompts.empty()) {
      const double s = seconds_of(step(policy));
      sum += s, longest = std::max(longest, s);
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
const ChunkPolicy& kEqualTime = *find_chunk_policy("equal_time");

TEST_CASE("chunks: equal_time finds the number of waves that takes least time", "[chunks]") {
  // n waves of 100 tokens take n c + 100 b + (P - 1)(c + 100 b / n), which is least at n = sqrt(100 (P - 1) b / c).
  ChunkView view{.budget = 100, .minimum = 5, .stages = 2, .cost = {1, 1, 0, 0, 0, 0}};
  ChunkScene two({{.left = 100}}, view);
  CHECK(tokens(two.step(kEqualTime)) == Tokens{10});
  CHECK(two.makespan(kEqualTime) == 9 * 11 + 11);  // the rest of the prompt is cut in the same way
  CHECK(ChunkScene({{.left = 100}}, view).makespan(kEqualTime) == 121);
  view.stages = 5;  // n = 20
  CHECK(tokens(ChunkScene({{.left = 100}}, view).step(kEqualTime)) == Tokens{5});
  CHECK(ChunkScene({{.left = 100}}, view).makespan(kEqualTime) == 120 + 4 * 6);
  view.stages = 1;  // no pipeline to fill: one wave
  CHECK(tokens(ChunkScene({{.left = 100}}, view).step(kEqualTime)) == Tokens{100});
  // Several prompts are one stream: a wave goes on with the next prompt while there is time.
  view.stages = 2;
  CHECK(tokens(ChunkScene({{.left = 4}, {.left = 96}}, view).step(kEqualTime)) == Tokens{4, 6});
  ChunkScene late({{.left = 7}, {.left = 93}}, view);
  late.state = {.head = 1, .wave_s = 11};             // chosen when the prompt was alone
  CHECK(tokens(late.step(kEqualTime)) == Tokens{7});  // 3 of the next one would be less than the minimum
}

TEST_CASE("chunks: the search of equal_time ends with more prompts than it looks at", "[chunks]") {
  // The search once never ended, because no wave of the minimum could begin at its last stops.
  for (int n : {1, 3, 15, 16, 17, 40})
    for (int minimum : {512, 2048, 3000}) {
      ChunkView view{.budget = 8192, .minimum = minimum, .block_tokens = 512, .stages = 8};
      view.cost = {5.75e-3, 40.6e-6, 1.5e-9, 0.375e-9, 0, 0};
      ChunkScene scene(std::vector<ChunkPrompt>(size_t(n), ChunkPrompt{.left = 131072}), view);
      const auto pieces = scene.step(kEqualTime);
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
                                          .cost = {5e-3, 3e-5, 1e-8, 3e-10, 0, 0}});
    int n = 0, last = INT_MAX;
    while (!scene.prompts.empty()) {
      const int left = scene.prompts[0].left;
      const std::vector<ChunkPrompt> pieces = scene.step(kEqualTime);
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

struct Costs {
  Random random;
  double up_to(double x) { return random.uniform() * x; }
  int below(int n) { return int(random.below(uint64_t(n))); }
  StepCost::Terms terms() { return {up_to(1e-2), 1e-6 + up_to(1e-4), up_to(1e-7), up_to(1e-8), 0, 0}; }
};

TEST_CASE("chunks: every prompt ends, in blocks and in order, without pieces below the minimum", "[chunks]") {
  Costs costs{Random(3)};
  for (const ChunkPolicy& policy : {kAllRoom, kEqualTime})
    for (int i = 0; i < 300; ++i) {
      const int block = 1 << costs.below(7);
      ChunkView view{.decodes = costs.below(40),
                     .decode_context = 1000,
                     .budget = 200 + costs.below(4000),
                     .block_tokens = block,
                     .stages = 1 + costs.below(8),
                     .cost = costs.terms()};
      view.minimum = costs.below(2) ? chunk_minimum(view.budget, block) : 1 + costs.below(300);
      ChunkScene scene({}, view);
      for (int n = 1 + costs.below(6); n > 0; --n)
        scene.prompts.push_back({uint64_t(n), block * costs.below(9), 2 + costs.below(costs.below(2) ? 300 : 9000)});
      std::map<uint64_t, int> whole, seen;
      for (const ChunkPrompt& p : scene.prompts) whole[p.id] = p.left;
      const int room = view.budget - view.decodes, half = room / 2;
      const int least = std::min(view.minimum, half);
      const int in_blocks = least >= block ? least / block * block : least;
      for (int steps = 0; !scene.prompts.empty(); ++steps) {
        INFO(policy.name << " " << i << " step " << steps << " block " << block << " budget " << view.budget
                         << " minimum " << view.minimum << " decodes " << view.decodes);
        REQUIRE(steps < 5000);
        const std::vector<ChunkPrompt> before = scene.prompts;
        const ChunkChoice choice = scene.choose(policy);
        REQUIRE(choice.step_tokens <= view.budget);
        REQUIRE(choice.step_tokens >= 1);
        const std::vector<ChunkPrompt> pieces = scene.step(policy);
        REQUIRE(!pieces.empty());
        int total = 0;
        for (size_t k = 0; k < pieces.size(); ++k) {
          const ChunkPrompt& p = pieces[k];
          CHECK(p.id == before[k].id);  // no prompt is overtaken
          CHECK(p.left <= view.budget);
          const bool ends = p.left == before[k].left;
          if (p.left < whole[p.id]) CHECK(p.left >= in_blocks);
          if (!ends && in_blocks >= block) CHECK((p.done + p.left) % block == 0);
          total += p.left;
          seen[p.id] += p.left;
        }
        CHECK(total <= room);
      }
      CHECK(seen == whole);
    }
}

}  // namespace xpyd::testing::chunk_policy_test
