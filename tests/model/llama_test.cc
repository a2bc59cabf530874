// The forward pass against Hugging Face transformers (fixtures of tests/data/make_model_fixtures.py), and against
// itself: the same bits however the tokens are cut into steps.
#include <cmath>
#include <cstring>

#include "model/gemm.h"
#include "model/weights.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing::llama_test {
namespace {

const std::vector<std::string> kFixtures = {"llama2", "llama31", "llama_linear_bias", "mistral", "qwen2", "qwen3"};

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

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(double(a[i]) - double(b[i]));
    largest = difference <= largest ? largest : difference;  // NaN wins
  }
  return largest;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_CASE("llama: logits agree with Hugging Face for every family", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel loaded(data_path("models/" + name));
    Expected expected = load_expected(name, loaded.config.vocab);
    // Logits have unit variance. Two f32 computations that add in other orders differ by some tens
    // of roundings of 6e-8: measured 2e-6 to 6e-6.
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
    // A weight is off by up to 2^-9 of itself, 2^-9 / sqrt(3) = 0.11 % rms, and a layer passes an
    // activation through four products in a row: a few roundings' worth at each, added in squares,
    // gives about 1 % of the logits' size after three layers (measured 0.8 % to 1.4 %).
    double error = 0, size = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      error += std::pow(double(logits[i]) - double(expected.logits[i]), 2);
      size += std::pow(double(expected.logits[i]), 2);
    }
    CHECK(std::sqrt(error / size) < 0.025);
    CHECK(std::sqrt(error / size) > 0.001);  // it was rounded
    CHECK(largest_difference(logits, expected.logits) < 0.2);
  }
}

TEST_CASE("llama: the same bits in one step, in chunks and token by token", "[model][llama]") {
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

TEST_CASE("llama: the same bits on one thread and on three", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel one(data_path("models/" + name)), three(data_path("models/" + name), {}, 3);
    Expected expected = load_expected(name, one.config.vocab);
    for (int chunk : {1, 64})
      CHECK(
          same_bits(run_prompt(*one.model, expected.tokens, chunk), run_prompt(*three.model, expected.tokens, chunk)));
  }
}

TEST_CASE("llama: a sequence's bits do not depend on its batch mates", "[model][llama]") {
  LoadedModel loaded(data_path("models/qwen3"), {}, 2);
  const int vocab = loaded.config.vocab;
  const std::vector<std::vector<int32_t>> prompts = {{5}, {9, 200, 3, 77, 8}, {1, 2, 3}, {240, 0}};
  std::vector<std::vector<float>> alone;
  for (const auto& prompt : prompts) alone.push_back(run_prompt(*loaded.model, prompt, 64));

  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
    ContiguousKv kv(*loaded.model, 8, 4, order);
    // The first step takes all but the last token of each, in slots of another order.
    std::vector<KvView> views = {kv.view(2), kv.view(0), kv.view(3), kv.view(1)};
    std::vector<std::vector<int32_t>> heads, tails;
    std::vector<int> zeros(4, 0), past;
    for (const auto& p : prompts) {
      heads.emplace_back(p.begin(), p.end() - 1);
      tails.push_back({p.back()});
      past.push_back(int(p.size()) - 1);
    }
    const auto first = run_step(*loaded.model, views, heads, zeros);
    const auto second = run_step(*loaded.model, views, tails, past);
    size_t at = 0;
    for (size_t s = 0; s < prompts.size(); ++s) {
      std::vector<float> together(first.begin() + long(at), first.begin() + long(at + heads[s].size() * size_t(vocab)));
      at += heads[s].size() * size_t(vocab);
      together.insert(together.end(), second.begin() + long(s) * vocab, second.begin() + long(s + 1) * vocab);
      CHECK(same_bits(together, alone[s]));
    }
  }
}

TEST_CASE("llama: only the wanted rows' logits, with the bits they have among all", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel loaded(data_path("models/" + name));
    const size_t vocab = size_t(loaded.config.vocab);
    const std::vector<std::vector<int32_t>> prompts = {
        {5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, {1, 2, 3}, {20, 21, 22, 23}, {30}};
    ContiguousKv kv(*loaded.model, 16, 4);
    std::vector<KvView> views = {kv.view(0), kv.view(1), kv.view(2), kv.view(3)};
    const auto all = run_step(*loaded.model, views, prompts, {0, 0, 0, 0});
    std::vector<int32_t> ids, offsets = {0}, lengths;
    for (const auto& p : prompts) {
      ids.insert(ids.end(), p.begin(), p.end());
      offsets.push_back(int32_t(ids.size()));
      lengths.push_back(int32_t(p.size()));
    }
    for (const std::vector<int32_t>& rows :
         std::vector<std::vector<int32_t>>{{}, {9}, {12}, {9, 12, 16, 17}, {4, 7, 9, 13}, {0}, {17}}) {
      ContiguousKv fresh(*loaded.model, 16, 4);
      std::vector<KvView> fresh_views = {fresh.view(0), fresh.view(1), fresh.view(2), fresh.view(3)};
      std::vector<float> logits(rows.size() * vocab + 1, -7);
      loaded.model->forward({ids, offsets, lengths, fresh_views, rows}, logits.data());
      for (size_t i = 0; i < rows.size(); ++i)
        CHECK(std::memcmp(&logits[i * vocab], &all[size_t(rows[i]) * vocab], vocab * 4) == 0);
      CHECK(logits.back() == -7);
      // The KV is whole whatever logits were wanted: the next token agrees.
      const auto next = run_step(*loaded.model, fresh_views, {{3}, {4}, {5}, {6}}, {10, 3, 4, 1});
      const auto expected = run_step(*loaded.model, views, {{3}, {4}, {5}, {6}}, {10, 3, 4, 1});
      CHECK(same_bits(next, expected));
    }
  }
}

TEST_CASE("llama: the observer sees each layer's KV, complete", "[model][llama]") {
  LoadedModel loaded(data_path("models/llama31"));
  ContiguousKv kv(*loaded.model, 6, 2);
  struct Observer : LayerObserver {
    void layer_done(int layer) override {
      CHECK(layer == next++);
      for (int slot = 0; slot < 2; ++slot)
        for (int token = 0; token < (slot ? 2 : 6); ++token)
          for (int kv_index = 0; kv_index < 2; ++kv_index) {
            auto written = [&](int l) {
              auto* row = reinterpret_cast<const float*>(kv->view(slot).row(l, kv_index, token, 0));
              return !std::isnan(row[0]) && !std::isnan(row[kv->layout.shape.head_dim - 1]);
            };
            CHECK(written(layer));
            if (layer + 1 < kv->layout.shape.n_layers) CHECK_FALSE(written(layer + 1));
          }
    }
    const ContiguousKv* kv = nullptr;
    int next = 0;
  } observer;
  observer.kv = &kv;
  run_step(*loaded.model, {kv.view(0), kv.view(1)}, {{1, 2, 3, 4, 5, 6}, {7, 8}}, {0, 0}, &observer);
  CHECK(observer.next == 3);
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
  // The last layer's o_proj and MLP run for wanted rows only: here for one token of two, or for none.
  const double one_token = 2.0 * c.hidden * (c.n_heads * c.head_dim + 3.0 * c.intermediate);
  CHECK(with.flops - without.flops < 2.0 * c.vocab * c.hidden + 1.1 * one_token);
  CHECK(with.bytes - without.bytes > 4.0 * c.vocab * c.hidden);
  CHECK(loaded.model->weight_bytes() == 4 * size_t(c.parameters()));
  LoadedModel tied(data_path("models/llama31"));  // the packed lm_head is a copy
  CHECK(tied.model->weight_bytes() ==
        4 * size_t(tied.config.parameters() + long(tied.config.vocab) * tied.config.hidden));
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

TEST_CASE("llama: rope frequencies of the scaled kinds", "[model][llama]") {
  ModelConfig c;
  c.head_dim = 128;
  c.rope_theta = 500000;
  const auto plain = rope_frequencies(c);
  CHECK(plain[0] == 1);
  CHECK(plain[63] == Approx(std::pow(500000.0, -126.0 / 128)).epsilon(1e-12));
  c.rope_scaling = {RopeScaling::Kind::llama3, 8, 1, 4, 8192};
  const auto scaled = rope_frequencies(c);
  CHECK(scaled[0] == plain[0]);                               // many turns: kept
  CHECK(scaled[63] == Approx(plain[63] / 8).epsilon(1e-12));  // less than one turn: slowed
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

}  // namespace
}  // namespace xpyd::testing::llama_test
