// Tests the forward pass against Hugging Face transformers (fixtures of tests/data/make_model_fixtures.py), and against
// itself: bits do not depend on how the tokens are cut into steps.

#include "model/gemm/gemm.h"
#include "model/weights/weights.h"
#include "tests/json.h"
#include "tests/model/llama_cases.h"

namespace xpyd::testing::llama_test {

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

TEST_CASE("llama: the bits are the same in one step, in chunks and token by token, on one thread and on three",
          "[model][llama]") {
  for (const std::string& name : kFixtures)
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      CAPTURE(name, dtype_name(dtype));
      LoadedModel one(data_path("models/" + name), {.dtype = dtype}),
          three(data_path("models/" + name), {.dtype = dtype}, 3);
      Expected expected = load_expected(name, one.config.vocab);
      const auto whole = run_prompt(*one.model, expected.tokens, 64);
      for (int chunk : {1, 3, 7, 16, 31, 64}) {
        CAPTURE(chunk);
        CHECK(same_bits(run_prompt(chunk % 3 ? *three.model : *one.model, expected.tokens, chunk), whole));
      }
    }
}

void check_wanted_rows(Model& model) {
  const size_t vocab = size_t(model.config().vocab);
  const std::vector<std::vector<int32_t>> prompts = {
      {30}, {5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, {1, 2, 3}, {31}, {20, 21, 22, 23}};
  const auto views_of = [](const ContiguousKv& kv) {
    return std::vector<KvView>{kv.view(0), kv.view(1), kv.view(2), kv.view(3), kv.view(4)};
  };
  // The KV is complete whatever logits were wanted: the next tokens agree.
  const auto next = [&](const std::vector<KvView>& views) {
    return run_step(model, views, {{3}, {4}, {5}, {6}, {7}}, {1, 10, 3, 1, 4});
  };
  const ContiguousKv kv(model, 16, 5);
  const auto all = run_step(model, views_of(kv), prompts, {0, 0, 0, 0, 0}), expected = next(views_of(kv));
  std::vector<int32_t> ids, offsets = {0}, lengths;
  for (const auto& p : prompts) {
    ids.insert(ids.end(), p.begin(), p.end());
    offsets.push_back(int32_t(ids.size()));
    lengths.push_back(int32_t(p.size()));
  }
  for (const std::vector<int32_t>& rows :
       std::vector<std::vector<int32_t>>{{}, {10}, {0, 10, 13, 14, 18}, {14}, {15, 18}}) {
    CAPTURE(rows);
    const ContiguousKv fresh(model, 16, 5);
    const auto views = views_of(fresh);
    std::vector<float> logits(rows.size() * vocab + 1, -7);
    compute_step(model, {ids, offsets, lengths, views, rows}, logits.data());
    for (size_t i = 0; i < rows.size(); ++i)
      CHECK(std::memcmp(&logits[i * vocab], &all[size_t(rows[i]) * vocab], vocab * 4) == 0);
    CHECK(logits.back() == -7);
    CHECK(same_bits(next(views), expected));
  }
}

TEST_CASE("llama: logits of the wanted rows have the bits that they have among all rows", "[model][llama]") {
  for (const std::string& name : kFixtures) {
    CAPTURE(name);
    LoadedModel loaded(data_path("models/" + name));
    check_wanted_rows(*loaded.model);
  }
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

}  // namespace xpyd::testing::llama_test
