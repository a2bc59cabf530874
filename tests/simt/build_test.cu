// Tests --device cuda from the options to the tokens, and its error messages.
#include <fstream>

#include "device_memory.h"
#include "disagg/instance/cluster.h"
#include "server/build.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::build_test {

constexpr const char* kConfig =
    R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128,
  "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
  "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000,
  "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false, "hidden_act": "silu"})";

constexpr const char* kExperts =
    R"({"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 128, "num_local_experts": 5,
  "num_experts_per_tok": 2, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
  "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000})";

struct ModelDir {
  TempDir dir;
  explicit ModelDir(const char* config = kConfig) { std::ofstream(dir.path + "/config.json") << config; }
};

Result<std::unique_ptr<Build>> build(const ModelDir& model, std::vector<std::string> words) {
  words.insert(words.begin(), {"--load-format", "dummy", "--kv-bytes", "1MiB"});
  words.push_back(model.dir.path);
  auto options = Options::parse(option_table(), "generate", words, 1);
  INFO((options ? "" : options.error().message));
  REQUIRE(options);
  return make_build(options.value());
}

std::vector<int32_t> tokens(const ModelDir& model, std::vector<std::string> words,
                            std::vector<int32_t> prompt = {5, 9, 33, 70, 2, 8, 8, 101, 64, 3}, float temperature = 0) {
  auto made = build(model, std::move(words));
  INFO((made ? "" : made.error().message));
  REQUIRE(made);
  auto recorder = std::make_shared<Recorder>();
  auto request = tiny_request(1, std::move(prompt), 12);
  request->sampling.temperature = temperature;
  REQUIRE(made.value()->cluster->submit(request, recorder).ok());
  while (made.value()->cluster->turn()) {
  }
  CHECK(recorder->ended() == 1);
  return recorder->choice(1).tokens;
}

struct Limit {
  explicit Limit(size_t bytes) { cuda::simt::set_device_memory_limit(bytes); }
  ~Limit() { cuda::simt::set_device_memory_limit(0); }
};

TEST_CASE("--device cuda: tokens are the CPU's, however P and D share the GPU", "[simt][server]") {
  ModelDir model;
  std::vector<int32_t> prompt;  // of several blocks
  for (int i = 0; i < 100; ++i) prompt.push_back((i * 7 + 3) % 128);
  const std::vector<int32_t> expected = tokens(model, {}, prompt);
  REQUIRE(expected.size() > 1);
  const std::vector<std::vector<std::string>> ways = {
      {},
      {"--topology", "1P1D"},
      {"--topology", "1P1D", "--transport", "handoff", "--gpu-split", "off"},
      {"--topology", "1P1D", "--allocator", "contiguous"},
      {"--allocator", "slots"},  // a slot is the whole context
      {"--topology", "1P1D", "--allocator", "slots", "--kv-layout", "token_major"},
      {"--topology", "1P1D", "--gpu-split", "priority"},
      {"--speculate", "ngram", "--speculate-tokens", "3"},
      {"--topology", "1P1D", "--speculate", "ngram"},
      {"--topology", "1P1D", "--kv-layout", "token_major", "--cuda-decode-attention", "split_kv"}};
  for (std::vector<std::string> words : ways) {
    words.insert(words.end(), {"--device", "cuda"});
    CHECK(tokens(model, words, prompt) == expected);
  }
  // A page group holds 256 tokens of a layer's K or V, or 64 of all layers.
  for (const char* layout : {"layer_major", "token_major"})
    for (const char* ahead : {"on", "off"})
      CHECK(tokens(model,
                   {"--device", "cuda", "--topology", "1P1D", "--allocator", "vattention", "--kv-layout", layout,
                    "--page-group-bytes", "64KiB", "--max-batch", "4", "--async-scheduling", ahead},
                   prompt) == expected);
  CHECK(tokens(model,
               {"--device", "cuda", "--allocator", "vattention", "--kv-layout", "token_major", "--kv-bytes", "4MiB",
                "--host-kv-bytes", "4MiB"},
               prompt) == expected);
  CHECK(tokens(model, {"--device", "cuda", "--dtype", "bf16", "--kv-dtype", "bf16", "--cuda-prefill-attention",
                       "flash_mma", "--cuda-decode-attention", "split_mma"})
            .size() == tokens(model, {}).size());
  const ModelDir experts(kExperts);
  CHECK(tokens(experts, {"--device", "cuda", "--topology", "1P1D"}, prompt) == tokens(experts, {}, prompt));
}

TEST_CASE("--device cuda: the CPU applies penalties, beside requests that are sampled on the GPU",
          "[simt][server][sampler]") {
  ModelDir model;
  const auto ask = [&](const std::vector<std::string>& words, float temperature) {
    auto made = build(model, words);
    INFO((made ? "" : made.error().message));
    REQUIRE(made);
    auto recorder = std::make_shared<Recorder>();
    for (uint64_t id = 0; id < 3; ++id) {
      auto request = tiny_request(id, {5, 9, 33, int32_t(id), 2, 8}, 12);
      request->sampling.temperature = temperature;
      request->sampling.seed = id;
      if (id == 1) request->sampling.presence_penalty = 2, request->sampling.frequency_penalty = 2;
      REQUIRE(made.value()->cluster->submit(request, recorder).ok());
    }
    while (made.value()->cluster->turn()) {
    }
    std::vector<std::vector<int32_t>> tokens;
    for (uint64_t id = 0; id < 3; ++id) tokens.push_back(recorder->choice(id).tokens);
    return tokens;
  };
  for (const float temperature : {0.0f, 1.0f}) {
    const auto expected = ask({}, temperature);
    REQUIRE(expected[1].size() > 1);
    for (const char* topology : {"1C", "1P1D"})
      for (const char* ahead : {"on", "off"}) {
        const auto got = ask({"--device", "cuda", "--topology", topology, "--async-scheduling", ahead}, temperature);
        CHECK(got[1] == expected[1]);  // other requests' draws may differ where sums round in another order
        if (temperature == 0) CHECK(got == expected);
      }
  }
}

TEST_CASE("--device cuda: the codes of a quantised folder are widened to --dtype", "[simt][server][quantised]") {
  ModelDir model;
  const std::string config = kConfig;
  std::ofstream(model.dir.path + "/config.json")
      << config.substr(0, config.size() - 1) << R"(, "quantization_config": {"quant_method": "fp8"}})";
  for (auto [device, dtype] : {std::pair("cpu", Dtype::fp8), {"cuda", Dtype::bf16}}) {
    const std::vector<std::string> words = {"--dtype",  "bf16", "--load-format", "dummy",
                                            "--device", device, model.dir.path};
    const auto made = prepare_build(Options::parse(option_table(), "generate", words, 1).value());
    REQUIRE(made);
    LoadOptions load = made.value()->backend_options.load;
    load.dummy = false;  // random weights are never quantised
    CHECK(matrix_dtype(made.value()->config, load) == dtype);
  }
}

TEST_CASE("--device cuda: planning ahead changes no token, on late streams too", "[simt][server]") {
  ModelDir model;
  for (const char* dtype : {"f32", "bf16"}) {
    INFO(dtype);
    for (float temperature : {0.f, 1.f}) {
      auto run = [&](const char* ahead) {
        return tokens(model, {"--device", "cuda", "--dtype", dtype, "--kv-dtype", dtype, "--async-scheduling", ahead},
                      {5, 9, 33, 70, 2, 8, 8, 101, 64, 3}, temperature);
      };
      const auto expected = run("on");
      CHECK(run("off") == expected);  // the host knows each token before it plans the next step
      cuda::simt::Late late(true);
      CHECK(run("on") == expected);
    }
  }
}

TEST_CASE("--device cuda: impossible options are errors, and nothing aborts", "[simt][server]") {
  ModelDir model;
  auto refused = [&](std::vector<std::string> words, ErrorCode code, const std::string& says) {
    words.insert(words.end(), {"--device", "cuda"});
    auto made = build(model, words);
    REQUIRE_FALSE(made);
    INFO(made.error().message);
    CHECK(made.error().code == code);
    CHECK(made.error().message.find(says) != std::string::npos);
  };
  refused({"--cuda-prefill-attention", "fast"}, ErrorCode::invalid_argument, "there is no variant \"fast\"");
  refused({"--cuda-prefill-attention", "flash_mma"}, ErrorCode::invalid_argument, "bf16");
  for (const char* dtype : {"f16", "int8", "int4", "fp8", "bf16"})
    refused({"--weight-dtype", dtype}, ErrorCode::invalid_argument,
            "--device cuda supports weight matrices of type --dtype only, here f32");
  for (const char* dtype : {"int8", "int4", "fp8_e4m3"})
    refused({"--kv-dtype", dtype}, ErrorCode::invalid_argument,
            "--device cuda does not support it: expected f32 or bf16");
  refused({"--allocator", "vattention", "--page-group-bytes", "12KiB"}, ErrorCode::invalid_argument,
          "page-group-bytes is 12288: expected a multiple of 65536");
  {
    Limit limit(64 << 10);
    refused({}, ErrorCode::unavailable, "weights");
  }
  Limit limit(24 << 20);
  refused({"--kv-bytes", "30MiB"}, ErrorCode::unavailable, "--kv-bytes");
  refused({"--kv-bytes", "30MiB", "--allocator", "vattention"}, ErrorCode::unavailable, "page groups of 2097152 bytes");
}

}  // namespace xpyd::testing::build_test
