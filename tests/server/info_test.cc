#include <cmath>
#include <fstream>

#include "allocator/kv_memory.h"
#include "base/json/json.h"
#include "model/folder.h"
#include "model/weights/weights.h"
#include "server/build.h"
#include "server/cli/commands.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::info_test {

using nlohmann::json;

constexpr const char* kConfig =
    R"({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64,
  "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
  "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000,
  "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false, "hidden_act": "silu"})";

struct Info {
  int code;
  json out;
};

Info run_info(const std::string& dir, std::vector<std::string> words) {
  testing::TempDir results;
  std::string path = results.path + "/info.json";
  for (const std::string& word : {dir, std::string("--json"), path}) words.push_back(word);
  auto options = Options::parse(option_table(), "info", words, 1);
  INFO((options ? "" : options.error().message));
  REQUIRE(options);
  Info info{0, {}};
  {
    testing::QuietStdout quiet;
    info.code = info_main(options.value());
  }
  if (auto text = read_small_file(path, 1 << 20)) info.out = testing::parsed(text.value());
  return info;
}

struct ModelDir {
  testing::TempDir dir;
  explicit ModelDir(const std::string& config = kConfig) { std::ofstream(dir.path + "/config.json") << config; }
};

TEST_CASE("info: KV bytes and pool sizes follow from the model's shape", "[info]") {
  ModelDir model;
  Info info = run_info(model.dir.path, {"--kv-bytes", "1MB", "--tokens", "100"});
  REQUIRE(info.code == 0);
  // Bytes per token: 2 (K, V) x 3 layers x 2 heads x 16 dims x 4 or 2 bytes.
  CHECK(info.out["kv_bytes_per_token"]["f32"] == 768);
  CHECK(info.out["kv_bytes_per_token"]["bf16"] == 384);
  REQUIRE(info.out["pools"].size() == kv_schemes().size());
  for (const json& pool : info.out["pools"]) {
    if (pool["scheme"] == "vattention") {  // one group of 64 KiB per layer for each of K and V: 512 tokens
      CHECK(pool["block_tokens"] == 512);
      CHECK(pool["block_bytes"] == 6 * 65536);
      CHECK(pool["blocks"] == 2);
      CHECK(pool["transfer"]["layer_major"]["descriptors"] == 2 * 3);
      continue;
    }
    const bool slots = pool["scheme"] == "contiguous" || pool["scheme"] == "slots";
    const int block_tokens = slots ? 256 : 16;
    CHECK(pool["block_tokens"] == block_tokens);
    CHECK(pool["block_bytes"] == 768 * block_tokens);
    CHECK(pool["blocks"] == 1000000 / (768 * block_tokens));
    CHECK(pool["unused_bytes"] == 1000000 % (768 * block_tokens));
    const int blocks = slots ? 1 : (100 + block_tokens - 1) / block_tokens;
    CHECK(pool["transfer"]["layer_major"]["descriptors"] == 2 * 3 * blocks);
    CHECK(pool["transfer"]["token_major"]["descriptors"] == blocks);
    CHECK(pool["transfer"]["layer_major"]["bytes"] == 100 * 768);
  }
  // A pool that is too small for one slot, or for one page-group row, reports an error. The other schemes still have
  // their rows.
  info = run_info(model.dir.path, {"--kv-bytes", "20000"});
  REQUIRE(info.code == 0);
  int errors = 0;
  for (const json& pool : info.out["pools"]) errors += pool.contains("error");
  CHECK(errors == 3);  // contiguous, slots and vattention
}

TEST_CASE("info: weight sizes match those of a loaded model", "[info]") {
  for (bool tied : {false, true})
    for (const char* family : {"llama", "qwen2", "qwen3"}) {
      json config = testing::parsed(kConfig);
      config["model_type"] = family;
      config["tie_word_embeddings"] = tied;
      ModelDir model(testing::as_text(config));
      auto parsed = load_model_config(model.dir.path);
      REQUIRE(parsed);
      ThreadTeam team(1);
      Info info;
      for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        info = run_info(model.dir.path, {"--dtype", dtype_name(dtype)});
        REQUIRE(info.code == 0);
        auto weights = load_weights(model.dir.path, parsed.value(), {.dtype = dtype, .dummy = true}, team);
        REQUIRE(weights);
        CHECK(info.out["weight_bytes"][dtype_name(dtype)] == weights.value()->bytes());
      }
      // A CUDA device also stores the RoPE table, and stores tied embeddings once. Its matrices are of --dtype.
      const Info on_card = run_info(model.dir.path, {"--dtype", "bf16", "--device", "cuda"});
      REQUIRE(on_card.code == 0);
      const ModelConfig& c = parsed.value();
      const double turns = 4.0 * c.max_position * c.head_dim, table = tied ? 2.0 * c.vocab * c.hidden : 0;
      CHECK(on_card.out["weight_bytes"].size() == 2);
      CHECK(on_card.out["weight_bytes"]["bf16"] == info.out["weight_bytes"]["bf16"].get<double>() + turns - table);
      CHECK(info.out["parameters"] == parsed.value().parameters());
    }
}

TEST_CASE("info: a model with experts counts all and active parameters, its weights and its steps", "[info][moe]") {
  json config = testing::parsed(kConfig);
  config.update({{"model_type", "qwen3_moe"}, {"num_experts", 6}, {"num_experts_per_tok", 2}});
  config.update({{"moe_intermediate_size", 24}, {"mlp_only_layers", {1}}});
  ModelDir model(testing::as_text(config));
  const ModelConfig parsed = load_model_config(model.dir.path).value();
  // Attention with head norms, a dense MLP of 96, two routers, two layers of six experts of 24, norms, both tables.
  const long attention = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 64 + 2 * 16, tables = 2 * 128 * 64 + 64;
  const long expert = 3 * 64 * 24, rest = 3 * attention + 3 * 64 * 96 + 2 * 6 * 64 + tables;
  CHECK(parsed.parameters() == rest + 2 * 6 * expert);
  CHECK(parsed.active_parameters() == rest + 2 * 2 * expert);
  ThreadTeam team(1);
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Info info = run_info(model.dir.path, {"--dtype", dtype_name(dtype)});
    REQUIRE(info.code == 0);
    const auto weights = load_weights(model.dir.path, parsed, {.dtype = dtype, .dummy = true}, team).value();
    CHECK(info.out["weight_bytes"][dtype_name(dtype)] == weights->bytes());
    CHECK(info.out["parameters"] == parsed.parameters());
    CHECK(info.out["experts"]["active_parameters"] == parsed.active_parameters());
    const json steps = info.out["experts"]["decode_steps"];
    CHECK(steps[0]["experts"] == Approx(2));
    CHECK(steps[1]["experts"] == Approx(6 * (1 - std::pow(4 / 6.0, 4))));
    const long expert_bytes = long(dtype_bytes(dtype)) * expert, four = steps[1]["bytes"], one = steps[0]["bytes"];
    CHECK(double(four - one) > 2 * double(expert_bytes) * (steps[1]["experts"].get<double>() - 2));
  }
  const json ranks = run_info(model.dir.path, {"--ranks", "4x1:2x3"}).out["ranks"];
  CHECK(ranks["experts"]["prefill"] == json{{0, 1}, {1, 3}, {3, 4}, {4, 6}});
  CHECK(ranks["experts"]["decode"] == json{{0, 3}, {3, 6}});
}

TEST_CASE("info: bad input is exit code 2", "[info]") {
  ModelDir model;
  CHECK(run_info(model.dir.path, {"--tokens", "257"}).code == 2);
  CHECK(run_info(model.dir.path, {"--max-model-len", "257"}).code == 2);
  CHECK(run_info("/no/such/folder", {}).code == 2);
  CHECK(run_info(ModelDir("{bad").dir.path, {}).code == 2);
  testing::TempDir empty;
  CHECK(run_info(empty.path, {}).code == 2);
}

TEST_CASE("info: --ranks lists which rank sends which heads and layers to which rank", "[info]") {
  json config = testing::parsed(kConfig);
  config["num_key_value_heads"] = 4;
  ModelDir model(testing::as_text(config));
  // The worked case of the notes: tp 2 to tp 4.
  const json ranks = run_info(model.dir.path, {"--ranks", "2x1:4x1"}).out["ranks"];
  REQUIRE(ranks["moves"].size() == 4);
  for (int to = 0; to < 4; ++to) {
    const json& move = ranks["moves"][size_t(to)];
    CHECK(move["from"] == to / 2);
    CHECK(move["to"] == to);
    CHECK(move["heads"] == json{to, to + 1});
    CHECK(move["layers"] == json{0, 3});
    CHECK(move["bytes"] == 2 * 3 * 16 * 4);
  }
  for (const char* bad : {"2", "2x1", "2x1:4x1x", "2x1:4x0", "3x1:1x1", "1x1:1x4", "-1x1:1x1", "99999x1:1x1"})
    CHECK(run_info(model.dir.path, {"--ranks", bad}).code == 2);
  CHECK_FALSE(run_info(model.dir.path, {}).out.contains("ranks"));
}

TEST_CASE("info: without a folder it describes the embedded demo model", "[info]") {
  auto options = Options::parse(option_table(), "info", {}, 1);
  REQUIRE(options);
  testing::QuietStdout quiet;
  CHECK(info_main(options.value()) == 0);
  CHECK(run_info(kDemoModel, {}).out["model"] == "xpyd-demo");
}

TEST_CASE("info reproduces the vAttention paper's Yi-34B example", "[info][vattention]") {
  ModelDir model(R"({"model_type": "llama", "num_hidden_layers": 60, "hidden_size": 7168,
      "intermediate_size": 20480, "num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 64000,
      "max_position_embeddings": 200000, "rms_norm_eps": 1e-5, "rope_theta": 5000000.0, "bos_token_id": 1,
      "eos_token_id": 2, "hidden_act": "silu", "tie_word_embeddings": false})");
  const auto addresses = [&](std::vector<std::string> words) {
    words.insert(words.end(), {"--max-batch", "500", "--kv-dtype", "bf16", "--kv-bytes", "512MiB"});
    const Info info = run_info(model.dir.path, words);
    REQUIRE(info.code == 0);
    for (const json& pool : info.out["pools"])
      if (pool["scheme"] == "vattention") {
        CHECK_FALSE(pool.contains("error"));
        return pool["addresses"];
      }
    return json();
  };
  const json one = addresses({}), two = addresses({"--prefill-tp", "2"});
  CHECK((one["buffers"] == 120 && one["token_bytes"] == 8 * 128 * 2));
  CHECK(one["buffer_bytes"] == 500.0 * 200000 * 2048);
  // The paper's numbers: two workers, 4 heads each, 100 GB a buffer, 12 TB a worker.
  CHECK((two["buffers"] == 120 && two["ranks"] == 2));
  CHECK((two["buffer_bytes"] == 102.4e9 && two["bytes"] == 12.288e12));
  // Both ranks are in one process, which reserves addresses for twice as many sequences.
  CHECK(two["reserved_bytes"] == 4 * 12.288e12);
  CHECK(two["process_share"].get<double>() == Approx(4 * 12.288e12 / 0x1p47));
  CHECK(addresses({"--prefill-pp", "7"})["buffers"] == 18);  // some stages have 9 layers, others 8
}

}  // namespace xpyd::testing::info_test
