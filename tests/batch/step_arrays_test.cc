// A step's arrays against their definition.
#include "batch/step_arrays.h"

#include "base/random.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::step_arrays_test {
namespace {

struct Scene {
  Scene() {
    KvOptions kv{.shape = kv_shape(tiny_config(), Dtype::bf16)};
    kv.pool_bytes = 4096 * kv.shape.token_bytes();
    memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  }
  std::unique_ptr<KvMemory> memory;
  StepArrays arrays;
  std::vector<SequencePtr> alive;

  void add(int n_tokens) {
    auto request = tiny_request(0, std::vector<int32_t>(size_t(n_tokens), 1), 1);
    alive.push_back(make_sequence(request, {}, nullptr, nullptr, nullptr));
    for (int32_t& t : alive.back()->tokens) t = next_token++ % 96;
    alive.back()->kv = memory->reserve(alive.back()->tokens, 0).value().handle;
    REQUIRE(memory->append(alive.back()->kv, n_tokens + 40));
  }
  void remove(size_t i) {
    memory->free(alive[i]->kv);
    alive.erase(alive.begin() + ptrdiff_t(i));
  }
  int32_t next_token = 0;
};

void check(Scene& scene, std::span<const StepEntry> entries) {
  const StepInput step = scene.arrays.gather(entries, *scene.memory, nullptr);
  std::vector<int32_t> ids, offsets = {0}, lengths, rows;
  REQUIRE(step.views.size() == entries.size());
  for (size_t r = 0; r < entries.size(); ++r) {
    const StepEntry& e = entries[r];
    for (int i = e.first; i < e.end(); ++i) ids.push_back(e.sequence->tokens[size_t(i)]);
    offsets.push_back(int32_t(ids.size()));
    lengths.push_back(e.end());
    if (e.wants_logits) rows.push_back(int32_t(ids.size()) - 1);
    CHECK(step.views[r].block_table == scene.memory->view(e.sequence->kv).block_table);
  }
  auto same = [](std::span<const int32_t> a, const std::vector<int32_t>& b) {
    return std::vector<int32_t>(a.begin(), a.end()) == b;
  };
  REQUIRE(same(step.token_ids, ids));
  REQUIRE(same(step.q_offsets, offsets));
  REQUIRE(same(step.kv_lengths, lengths));
  REQUIRE(same(step.logit_rows, rows));
}

TEST_CASE("a step's arrays are right however steps follow one another", "[batch]") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Scene scene;
    Random random(seed);
    for (int step = 0; step < 200; ++step) {
      for (uint64_t n = random.below(3); n > 0 && scene.alive.size() < 20; --n) scene.add(1 + int(random.below(30)));
      if (!scene.alive.empty() && random.below(3) == 0) scene.remove(size_t(random.below(scene.alive.size())));
      std::vector<StepEntry> entries;
      for (const SequencePtr& s : scene.alive) {
        if (random.below(8) == 0) continue;  // not in this step
        const bool decodes = random.below(4) != 0;
        const int last = int(s->tokens.size()), n = decodes ? 1 : 1 + int(random.below(uint64_t(last)));
        entries.push_back({s.get(), last - n, n, random.below(6) != 0});
      }
      check(scene, entries);
    }
  }
}

}  // namespace
}  // namespace xpyd::testing::step_arrays_test
