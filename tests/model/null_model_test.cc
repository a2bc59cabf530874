#include "experiments/null_model.h"

#include <algorithm>

#include "tests/model/model_fixture.h"

namespace xpyd::testing::null_model_test {
namespace {

TEST_CASE("null model: logits follow from token and position alone", "[model][null_model]") {
  ModelConfig config;
  config.n_layers = 3;
  config.n_kv_heads = 2;
  config.head_dim = 4;
  config.vocab = 37;
  auto model = make_null_model(config);
  struct Observer : LayerObserver {
    void layer_done(int layer) override { CHECK(layer == calls++); }
    int calls = 0;
  } observer;
  const std::vector<std::vector<int32_t>> prompts = {{4, 5, 6, 7}, {5, 5}};
  const std::vector<KvView> views(2);  // never looked at
  const auto together = run_step(*model, views, prompts, {0, 3}, &observer);
  CHECK(observer.calls == 3);
  for (size_t s = 0; s < 2; ++s)
    for (size_t i = 0; i < prompts[s].size(); ++i) {
      const auto alone = run_step(*model, {KvView{}}, {{prompts[s][i]}}, {int(s ? 3 + i : i)});
      const size_t row = s ? 4 + i : i;
      CHECK(std::equal(alone.begin(), alone.end(), together.begin() + long(row) * 37));
      CHECK(std::count(alone.begin(), alone.end(), 1.0f) == 1);
      CHECK(std::count(alone.begin(), alone.end(), 0.0f) == 36);
    }
  // The same token at another position goes on differently (somewhere in 20 positions).
  bool differs = false;
  for (int p = 1; p < 20; ++p)
    differs |= run_step(*model, {KvView{}}, {{5}}, {p}) != run_step(*model, {KvView{}}, {{5}}, {0});
  CHECK(differs);
}

}  // namespace
}  // namespace xpyd::testing::null_model_test
