// A folder in Meta's layout loads as Hugging Face's folder of the same model: the same configuration and the same bits.
#include "model/meta.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/text/tokenizer.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing::meta_test {
namespace {

void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// Writes the tensors of a fixture under Meta's names. Rows (head, half, i) of W_q and W_k in Hugging Face's order
// become rows (head, i, half) in Meta's, as in Meta's converter.
void write_metas(const std::string& fixture, const ModelConfig& config, const std::string& dir) {
  const Checkpoint checkpoint = Checkpoint::open(data_path("models/" + fixture)).value();
  nlohmann::json header;
  std::string data;
  for (std::string_view name : checkpoint.names()) {
    const TensorEntry& entry = *checkpoint.entry(name);
    std::string bytes(size_t(entry.end - entry.begin), 0);
    REQUIRE(checkpoint.find(name, entry.shape).value().read_bytes(0, bytes.size(), bytes.data()).ok());
    if (name.find("q_proj") != name.npos || name.find("k_proj") != name.npos) {
      const std::string theirs = bytes;
      const size_t rows = size_t(entry.shape[0]), row_bytes = bytes.size() / rows, half = size_t(config.head_dim) / 2;
      for (size_t head = 0; head < rows / (2 * half); ++head)
        for (size_t i = 0; i < half; ++i)
          for (size_t pair = 0; pair < 2; ++pair)
            bytes.replace((head * 2 * half + 2 * i + pair) * row_bytes, row_bytes, theirs,
                          (head * 2 * half + pair * half + i) * row_bytes, row_bytes);
    }
    header[meta_name(std::string(name))] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {data.size(), data.size() + bytes.size()}}};
    data += bytes;
  }
  header["rope.freqs"] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {data.size(), data.size() + 4}}};
  data += std::string(4, 0);
  const std::string text = header.dump();
  std::string length;
  for (int i = 0; i < 8; ++i) length += char(text.size() >> (8 * i));
  write(dir + "/model.safetensors", length + text + data);
}

}  // namespace

TEST_CASE("meta: a folder with params.json and Meta's tensors has Hugging Face's logits, bit for bit",
          "[model][meta]") {
  const std::vector<int32_t> prompt = {1, 5, 90, 33, 7, 8, 9, 60, 61, 2, 3};
  for (const char* fixture : {"llama2", "llama31"})
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      INFO(fixture << " " << dtype_name(dtype));
      const std::string theirs = data_path(std::string("models/") + fixture);
      LoadedModel expected(theirs, {.dtype = dtype});
      TempDir dir;
      write_metas(fixture, expected.config, dir.path);
      if (fixture == std::string("llama2"))
        write(dir.path + "/params.json", R"({"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "vocab_size": 211,
              "multiple_of": 100, "ffn_dim_multiplier": 0.7, "norm_eps": 1e-05, "max_seq_len": 128})");
      else  // params.json cannot express its head_dim; either file is read
        std::filesystem::copy_file(theirs + "/config.json", dir.path + "/config.json");
      LoadedModel model(dir.path, {.dtype = dtype});
      CHECK((run_prompt(*model.model, prompt, 4) == run_prompt(*expected.model, prompt, 4)));
      CHECK(model.config.intermediate == expected.config.intermediate);
    }
}

TEST_CASE("meta: params.json gives the same configuration as config.json", "[model][meta]") {
  const auto parsed = [](const std::string& text) {
    return parse_model_config(config_of_params(text, "params.json").value(), "params.json").value();
  };
  // Both files as published with Llama-3.1-8B.
  ModelConfig c = parsed(
      R"({"dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "n_heads": 32, "n_kv_heads": 8,
                             "n_layers": 32, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true,
                             "vocab_size": 128256})");
  CHECK(c.intermediate == 14336);
  CHECK(c.head_dim == 128);
  CHECK(c.n_kv_heads == 8);
  CHECK(c.rms_eps == 1e-5);
  CHECK(c.rope_theta == 500000);
  CHECK(c.rope_scaling.kind == RopeScaling::Kind::llama3);
  CHECK(c.rope_scaling.factor == 8);
  CHECK(c.rope_scaling.low_freq_factor == 1);
  CHECK(c.rope_scaling.high_freq_factor == 4);
  CHECK(c.rope_scaling.original_max_position == 8192);
  // Llama-2-7B and 70B.
  c = parsed(
      R"({"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": 32000})");
  CHECK(c.intermediate == 11008);
  CHECK(c.n_kv_heads == 32);
  CHECK(c.rope_theta == 10000);
  CHECK(c.rope_scaling.kind == RopeScaling::Kind::none);
  CHECK(c.max_position == 2048);
  c = parsed(R"({"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8,
                 "n_layers": 80, "norm_eps": 1e-05, "vocab_size": 32000})");
  CHECK(c.intermediate == 28672);
}

TEST_CASE("meta: without an eos id in a file, a text ends at the tokenizer's end tokens", "[model][meta]") {
  const auto names = [](const char* fixture) {
    const std::string file = data_path(std::string("tokenizers/") + fixture + ".json");
    const auto tokenizer = Tokenizer::parse(read_small_file(file, 1 << 20).value(), file).value();
    std::vector<std::string> found;
    for (int token : meta_eos_tokens(*tokenizer)) found.push_back(tokenizer->piece(token));
    return found;
  };
  CHECK(names("llama2") == std::vector<std::string>{"</s>"});
  CHECK(names("llama3") == std::vector<std::string>{"<|end_of_text|>", "<|eot_id|>"});
}

TEST_CASE("meta: impossible values are refused by their field or tensor", "[model][meta]") {
  const auto error = [](const std::string& text) { return config_of_params(text, "params.json").error().message; };
  CHECK(error("[1]") == "params.json: expected an object");
  CHECK(error("{}").find("dim") != std::string::npos);
  const std::string llama = R"({"dim": 48, "n_layers": 2, "n_heads": 6, "multiple_of": 100)";
  CHECK(error(llama + R"(, "vocab_size": -1})").find("vocab_size") != std::string::npos);
  CHECK(error(llama + R"(, "vocab_size": 9, "moe_args": {}})") == "params.json: moe_args: is not supported");
  const std::string whole = config_of_params(llama + R"(, "vocab_size": 9})", "params.json").value();
  CHECK(whole.find("\"hidden_size\":48") != std::string::npos);

  // Qwen's biases need their rows permuted, too, and Meta has no name for them.
  TempDir dir;
  const ModelConfig qwen = load_model_config(data_path("models/qwen2")).value();
  write_metas("qwen2", qwen, dir.path);
  ThreadTeam team(1);
  const auto loaded = load_weights(dir.path, qwen, {}, team);
  REQUIRE(!loaded.ok());
  CHECK(loaded.error().message.find("tok_embeddings.weight") != std::string::npos);
}

}  // namespace xpyd::testing::meta_test
