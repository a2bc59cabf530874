// Tests the forward pass against Hugging Face transformers (fixtures of tests/data/make_model_fixtures.py), and against
// itself: bits do not depend on how the tokens are cut into steps.
#include <algorithm>

#include "experiments/null_model.h"
#include "model/gemm/gemm.h"
#include "model/weights/weights.h"
#include "tests/json.h"
#include "tests/model/llama_cases.h"

namespace xpyd::testing::llama_test {
namespace {

struct Expected {
  std::vector<int32_t> tokens;
  std::vector<float> logits;  // [tokens, vocab]
};

Expected load_expected(const std::string& name, int vocab) {
  auto file = SafetensorsFile::open(data_path("models/" + name + "/expected.safetensors"));
  REQUIRE(file.ok());
  auto read = [&](const std::string& tensor, size_t n) {
    std::vector<float> values(n);
    REQUIRE(file.value()->tensors().at(tensor).end - file.value()->tensors().at(tensor).begin == 4 * n);
    REQUIRE(file.value()->read(tensor, file.value()->tensors().at(tensor), 0, int(n), values.data()).ok());
    return values;
  };
  Expected expected;
  const size_t n = size_t(file.value()->tensors().at("tokens").shape[0]);
  for (float t : read("tokens", n)) expected.tokens.push_back(int32_t(t));
  expected.logits = read("logits", n * size_t(vocab));
  return expected;
}

TEST_CASE("llama: logits agree with Hugging Face for every family", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel loaded(data_path("models/" + name));
    Expected expected = load_expected(name, loaded.config.vocab);
    // Logits have unit variance. Two f32 computations that add in other orders differ by some tens of roundings of
    // 6e-8: measured 2e-6 to 6e-6.
    CHECK(largest_difference(run_prompt(*loaded.model, expected.tokens, 64), expected.logits) < 2e-5);
  }
}

TEST_CASE("llama: bf16 matrices stay within their rounding", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel loaded(data_path("models/" + name), {.dtype = Dtype::bf16});
    loaded.model = make_llama(loaded.weights, loaded.team, 64, 64, {.gemm = &default_gemm(true)});
    Expected expected = load_expected(name, loaded.config.vocab);
    const auto logits = run_prompt(*loaded.model, expected.tokens, 64);
    if (name == "llama31" || name == "qwen3") {  // a bf16 checkpoint: nothing is rounded
      CHECK(largest_difference(logits, expected.logits) < 2e-5);
      continue;
    }
    // A weight is off by up to 2^-9 of itself, 2^-9 / sqrt(3) = 0.11 % rms. A layer passes an activation through four
    // products in a row. A few roundings at each, added in squares, give about 1 % of the logits' size after three
    // layers (measured 0.8 % to 1.4 %).
    const double error = relative_error(logits, expected.logits);
    CHECK(error < 0.025);
    CHECK(error > 0.001);  // proof of rounding
    CHECK(largest_difference(logits, expected.logits) < 0.2);
  }
}

TEST_CASE("llama: the bits are the same in one step, in chunks and token by token", "[model][llama]") {
  for (const std::string& name : kFixtures)
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      CAPTURE(name, dtype_name(dtype));
      LoadedModel loaded(data_path("models/" + name), {.dtype = dtype});
      Expected expected = load_expected(name, loaded.config.vocab);
      const auto whole = run_prompt(*loaded.model, expected.tokens, 64);
      for (int chunk : {1, 3, 7, 16, 31}) {
        CAPTURE(chunk);
        CHECK(same_bits(run_prompt(*loaded.model, expected.tokens, chunk), whole));
      }
    }
}

TEST_CASE("llama: the bits are the same on one thread and on three", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel one(data_path("models/" + name)), three(data_path("models/" + name), {}, 3);
    Expected expected = load_expected(name, one.config.vocab);
    for (int chunk : {1, 64})
      CHECK(
          same_bits(run_prompt(*one.model, expected.tokens, chunk), run_prompt(*three.model, expected.tokens, chunk)));
  }
}

TEST_CASE("llama: logits of the wanted rows have the bits that they have among all rows", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel loaded(data_path("models/" + name));
    check_wanted_rows(*loaded.model, [&] { return ContiguousKv(*loaded.model, 16, 5); });
  }
}

TEST_CASE("llama: work counts weights once and logits for wanted rows only", "[model][llama]") {
  LoadedModel loaded(data_path("models/llama2"));
  const ModelConfig& c = loaded.config;
  ContiguousKv kv(*loaded.model, 16);
  const std::vector<KvView> views = {kv.view()};
  const std::vector<int32_t> ids = {1, 2}, offsets = {0, 2}, lengths = {2}, none, one = {1};
  const Work without = loaded.model->work({ids, offsets, lengths, views, none});
  const Work with = loaded.model->work({ids, offsets, lengths, views, one});
  CHECK(with.flops - without.flops >= 2.0 * c.vocab * c.hidden);
  // The last layer's o_proj and MLP run for wanted rows only. Here that is one token of two, or none.
  const double one_token = 2.0 * c.hidden * (c.n_heads * c.head_dim + 3.0 * c.intermediate);
  CHECK(with.flops - without.flops < 2.0 * c.vocab * c.hidden + 1.1 * one_token);
  CHECK(with.bytes - without.bytes > 4.0 * c.vocab * c.hidden);
}

TEST_CASE("llama: dummy weights are seeded, finite and of sane size", "[model][llama]") {
  const std::string dir = data_path("models/qwen2");
  LoadedModel a(dir, {.dummy = true, .seed = 1}), b(dir, {.dummy = true, .seed = 1}, 2),
      c(dir, {.dummy = true, .seed = 2});
  const std::vector<int32_t> prompt = {1, 50, 100, 7, 8, 9};
  const auto logits = run_prompt(*a.model, prompt, 64);
  CHECK(same_bits(logits, run_prompt(*b.model, prompt, 64)));
  CHECK_FALSE(same_bits(logits, run_prompt(*c.model, prompt, 64)));
  double squares = 0;
  for (float x : logits) squares += double(x) * x;
  const double rms = std::sqrt(squares / double(logits.size()));
  CHECK(rms > 0.3);
  CHECK(rms < 3);
}

TEST_CASE("llama: scaled RoPE frequencies follow their definitions", "[model][llama]") {
  ModelConfig c;
  c.head_dim = 128;
  c.rope_theta = 500000;
  const auto plain = rope_frequencies(c);
  CHECK(plain[0] == 1);
  CHECK(plain[63] == Approx(std::pow(500000.0, -126.0 / 128)).epsilon(1e-12));
  c.rope_scaling = {RopeScaling::Kind::llama3, 8, 1, 4, 8192};
  const auto scaled = rope_frequencies(c);
  CHECK(scaled[0] == plain[0]);                               // many rotations: kept
  CHECK(scaled[63] == Approx(plain[63] / 8).epsilon(1e-12));  // less than one rotation: slowed
  bool blended = false;
  for (size_t i = 0; i < 64; ++i) {
    CHECK(scaled[i] <= plain[i]);
    CHECK(scaled[i] >= plain[i] / 8 * (1 - 1e-12));
    blended |= scaled[i] < plain[i] * 0.99 && scaled[i] > plain[i] / 8 * 1.01;
  }
  CHECK(blended);
  c.rope_scaling = {RopeScaling::Kind::linear, 4, 1, 4, 0};
  CHECK(rope_frequencies(c)[5] == Approx(plain[5] / 4).epsilon(1e-12));
}

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
  const std::vector<KvView> views(2);  // never read
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
  // The same token at another position has other logits, at least at one of 20 positions.
  bool differs = false;
  for (int p = 1; p < 20; ++p)
    differs |= run_step(*model, {KvView{}}, {{5}}, {p}) != run_step(*model, {KvView{}}, {{5}}, {0});
  CHECK(differs);
}

}  // namespace
}  // namespace xpyd::testing::llama_test
