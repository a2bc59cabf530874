// A real model end to end on the level of this room: greedy text of stories260k, made by another
// program, reproduced through tokenizer, forward pass, KV and sampler.
#include <algorithm>
#include <fstream>

#include "model/sampler.h"
#include "model/tokenizer.h"
#include "tests/json.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing::stories_test {
namespace {

// The continuation after `steps` forward passes over one position each (as the other program counts them, the first
// being BOS), or up to the end token. The prompt is taken in chunks of `chunk` tokens.
std::vector<int32_t> greedy(Model& model, std::vector<int32_t> tokens, int steps, int chunk) {
  ContiguousKv kv(model, steps + 1);
  const SamplingParams params{.temperature = 0};
  SamplerState state(params, 0, tokens);
  SamplerScratch scratch;
  const size_t vocab = size_t(model.config().vocab);
  const auto& eos = model.config().eos_tokens;
  int done = 0;
  std::vector<float> logits;
  while (int(tokens.size()) <= steps) {
    while (done < int(tokens.size())) {
      const int end = std::min(done + chunk, int(tokens.size()));
      logits = run_step(model, {kv.view()}, {{tokens.begin() + done, tokens.begin() + end}}, {done});
      done = end;
    }
    const std::span<const float> last(logits.data() + logits.size() - vocab, vocab);
    const int32_t next = sample(last, params, state, scratch).chosen.token;
    if (std::find(eos.begin(), eos.end(), next) != eos.end()) break;
    tokens.push_back(next);
  }
  return tokens;
}

TEST_CASE("stories260k: greedy text equals the golden file", "[model][stories]") {
  const std::string dir = shared_path("models/stories260k");
  const std::string golden = shared_path("golden/stories260k_greedy.json");
  if (dir.empty() || golden.empty()) SKIP_TEST("../shared/models/stories260k is absent");
  auto tokenizer = Tokenizer::load(dir);
  INFO((tokenizer ? "" : tokenizer.error().message));
  REQUIRE(tokenizer);
  LoadedModel loaded(dir, {}, 1, 512);
  const json cases = parsed_file(golden)["cases"];
  REQUIRE(cases.size() >= 3);
  for (const auto& c : cases) {
    const std::string prompt = c["prompt"], text = c["text"];
    const int steps = c["steps"];
    CAPTURE(prompt);
    for (int chunk : {512, 3}) {
      const auto tokens = greedy(*loaded.model, tokenizer.value()->encode(prompt), steps, chunk);
      CHECK(tokenizer.value()->decode(tokens) == text);
    }
  }
}

}  // namespace
}  // namespace xpyd::testing::stories_test
