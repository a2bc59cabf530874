// Tests config.json as published and as malformed, and the sampling defaults of generation_config.json.
#include "model/config.h"

#include <fstream>

#include "model/folder.h"
#include "model/generation_config.h"
#include "tests/json.h"
#include "tests/matchers.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing::config_test {

json llama() {
  return {{"model_type", "llama"},    {"hidden_act", "silu"},
          {"hidden_size", 64},        {"intermediate_size", 172},
          {"num_hidden_layers", 5},   {"num_attention_heads", 8},
          {"num_key_value_heads", 4}, {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-5},     {"rope_theta", 10000.0},
          {"vocab_size", 512},        {"bos_token_id", 1},
          {"eos_token_id", 2}};
}

json of_family(const std::string& type) {
  json config = llama();
  config["model_type"] = type;
  return config;
}

ModelConfig config_of(const json& j) {
  auto config = parse_model_config(as_text(j), "config.json");
  INFO((config ? "" : config.error().message));
  REQUIRE(config);
  return config.value();
}

std::string error_of(const json& j) {
  auto config = parse_model_config(as_text(j), "config.json");
  return config ? "accepted" : config.error().message;
}

TEST_CASE("config: a Llama config gets the family's defaults", "[model][config]") {
  ModelConfig c = config_of(llama());
  CHECK(c.head_dim == 8);
  CHECK(c.rms_eps == 1e-5);
  CHECK_FALSE((c.qkv_bias || c.o_bias || c.mlp_bias || c.qk_norm || c.tied_embeddings));
  CHECK(c.bos_token == 1);
  CHECK(c.eos_tokens == std::vector<int>{2});

  json j = llama();
  j.erase("num_key_value_heads");
  CHECK(config_of(j).n_kv_heads == 8);
  j["head_dim"] = 24;
  CHECK(config_of(j).head_dim == 24);
  j["attention_bias"] = true;
  CHECK((config_of(j).qkv_bias && config_of(j).o_bias));
  j["eos_token_id"] = {7, 8, 7};
  CHECK(config_of(j).eos_tokens == std::vector<int>{7, 8});
  j.erase("bos_token_id");
  CHECK(config_of(j).bos_token == -1);
  j["sliding_window"] = 9;  // not a field of Llama: ignored, as by Hugging Face
  CHECK(config_of(j).sliding_window == 0);
}

TEST_CASE("config: parameter counts match the published ones", "[model][config]") {
  for (const auto& [name, billions] :
       {std::pair{"llama-1b", 1.236}, {"llama-8b", 8.030}, {"mixtral-8x7b", 46.703}, {"qwen3-30b-a3b", 30.532}}) {
    auto config = load_model_config(std::string("experiments/models/") + name);
    REQUIRE(config);
    CHECK(double(config.value().parameters()) / 1e9 == Approx(billions).margin(0.001));
  }
}

TEST_CASE("config: RoPE scaling reads the same in its three spellings", "[model][config]") {
  json scaling = {
      {"factor", 8.0}, {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  for (int spelling = 0; spelling < 3; ++spelling) {
    json j = llama(), s = scaling;
    s[spelling == 0 ? "type" : "rope_type"] = "llama3";
    if (spelling == 2) {
      j.erase("rope_theta");
      s["rope_theta"] = 500000.0;
    } else {
      j["rope_theta"] = 500000.0;
    }
    j[spelling == 2 ? "rope_parameters" : "rope_scaling"] = s;
    ModelConfig c = config_of(j);
    CHECK(c.rope_theta == 500000);
    CHECK(c.rope_scaling.kind == RopeScaling::Kind::llama3);
    CHECK(c.rope_scaling.factor == 8);
    CHECK(c.rope_scaling.original_max_position == 8192);
  }
  json j = llama();
  j["rope_scaling"] = {{"type", "linear"}, {"factor", 2.5}};
  CHECK(config_of(j).rope_scaling.kind == RopeScaling::Kind::linear);
  CHECK(config_of(j).rope_scaling.factor == 2.5);
  j["rope_scaling"] = {{"rope_type", "default"}};
  CHECK(config_of(j).rope_scaling.kind == RopeScaling::Kind::none);
  j["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 2.0}};
  CHECK_THAT(error_of(j), Contains("config.json: rope_scaling.rope_type") && Contains("linear or llama3"));
  j["rope_scaling"] = {{"rope_type", "linear"}};
  CHECK_THAT(error_of(j), Contains("rope_scaling") && Contains("factor"));
  scaling["rope_type"] = "llama3";
  scaling["high_freq_factor"] = 1.0;
  j["rope_scaling"] = scaling;
  CHECK_THAT(error_of(j), Contains("rope_scaling.high_freq_factor"));
}

TEST_CASE("config: Mistral, Qwen2 and Qwen3 get their own defaults", "[model][config]") {
  json mistral = of_family("mistral");
  CHECK(config_of(mistral).sliding_window == 4096);  // the family's default
  mistral["sliding_window"] = nullptr;
  CHECK(config_of(mistral).sliding_window == 0);

  json qwen2 = of_family("qwen2");
  qwen2["sliding_window"] = 64;
  CHECK(config_of(qwen2).qkv_bias);
  CHECK_FALSE(config_of(qwen2).o_bias);
  CHECK(config_of(qwen2).sliding_window == 0);  // use_sliding_window is false by default
  qwen2["use_sliding_window"] = true;
  qwen2["max_window_layers"] = 3;
  CHECK(config_of(qwen2).sliding_window == 64);
  CHECK(config_of(qwen2).window_from_layer == 3);
  qwen2["max_window_layers"] = 5;  // beyond the last layer
  CHECK(config_of(qwen2).sliding_window == 0);

  const char *full = "full_attention", *sliding = "sliding_attention";
  qwen2["max_window_layers"] = 2;
  qwen2["layer_types"] = {full, full, sliding, sliding, sliding};
  CHECK(config_of(qwen2).window_from_layer == 2);
  for (const json& types : {json{full, sliding, full, sliding, full}, json{full}, json(3)}) {
    qwen2["layer_types"] = types;
    CHECK_THAT(error_of(qwen2), Contains("layer_types: differs from"));
  }

  json qwen3 = of_family("qwen3");
  CHECK(config_of(qwen3).qk_norm);
  CHECK(config_of(qwen3).head_dim == 128);  // the family's default
  CHECK_FALSE(config_of(qwen3).qkv_bias);
}

TEST_CASE("config: Mixtral and Qwen3-MoE have experts, in the layers that their fields name", "[model][config][moe]") {
  json mixtral = of_family("mixtral");
  mixtral["num_local_experts"] = 8, mixtral["num_experts_per_tok"] = 2;
  mixtral.erase("rope_theta"), mixtral.erase("rms_norm_eps");
  const ModelConfig m = config_of(mixtral);
  CHECK((m.experts.count == 8 && m.experts.used == 2 && m.experts.intermediate == 172 && m.experts.renormalise));
  CHECK((m.sparse_layers() == 5 && m.rope_theta == 1e6 && m.rms_eps == 1e-5));  // the class's own defaults
  CHECK(m.sliding_window == 0);
  mixtral["sliding_window"] = 64;
  CHECK(config_of(mixtral).sliding_window == 64);

  json qwen = of_family("qwen3_moe");
  qwen["num_experts"] = 6, qwen["num_experts_per_tok"] = 3, qwen["moe_intermediate_size"] = 24;
  CHECK((config_of(qwen).experts.intermediate == 24 && config_of(qwen).intermediate == 172));
  CHECK((config_of(qwen).qk_norm && config_of(qwen).head_dim == 8 && !config_of(qwen).experts.renormalise));
  json newer = qwen;  // as Transformers 5 writes it
  newer.erase("num_experts");
  newer["num_local_experts"] = 7;
  CHECK(config_of(newer).experts.count == 7);
  qwen["norm_topk_prob"] = true, qwen["decoder_sparse_step"] = 2, qwen["mlp_only_layers"] = {3};
  const ModelConfig q = config_of(qwen);
  CHECK((q.experts.renormalise && !q.sparse(0) && q.sparse(1) && !q.sparse(2) && !q.sparse(3) && !q.sparse(4)));
  const std::tuple<const char*, json, const char*> wrong[] = {
      {"num_experts", 0, "num_experts"},
      {"num_experts", nullptr, "num_experts"},
      {"num_experts_per_tok", 7, "num_experts_per_tok"},
      {"moe_intermediate_size", 0, "moe_intermediate_size"},
      {"decoder_sparse_step", 0, "decoder_sparse_step"},
      {"mlp_only_layers", {5}, "mlp_only_layers: expected layers from 0 to 4"},
      {"mlp_only_layers", 3, "mlp_only_layers: expected a list"},
      {"use_sliding_window", true, "use_sliding_window: true is not supported for qwen3_moe"},
      {"shared_expert_intermediate_size", 24, "shared experts are not supported"},
      {"num_nextn_predict_layers", 1, "num_nextn_predict_layers: not supported beside experts"}};
  for (const auto& [field, value, says] : wrong) {
    json j = qwen;
    j[field] = value;
    CAPTURE(field, as_text(value));
    CHECK_THAT(error_of(j), Contains("config.json") && Contains(says));
  }
  json large = qwen;  // each size is in its range
  large["num_hidden_layers"] = 4096, large["num_experts"] = 4096, large["moe_intermediate_size"] = 1 << 24;
  large["hidden_size"] = 1 << 20, large["head_dim"] = 128;
  CHECK_THAT(error_of(large), Contains("more than 2^60 parameters"));
}

TEST_CASE("config: each wrong field is named", "[model][config]") {
  for (const char* field : {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads", "vocab_size", "max_position_embeddings"}) {
    json j = llama();
    j.erase(field);
    CHECK_THAT(error_of(j), Contains("config.json") && Contains(field));
  }
  for (const json& one :
       parsed_file(data_path("hostile/config.json")))  // a field, its values, and the message for each
    for (const json& value : one[1]) {
      json j = llama();
      j[one[0].get<std::string>()] = value;
      CAPTURE(as_text(one), as_text(value));
      CHECK_THAT(error_of(j), Contains("config.json") && Contains(one[2].get<std::string>()));
    }
  for (const char* text : {"", "{", "[]", "3", "nul", "{\"model_type\":\"llama\",\"model_type\":\"llama\"}",
                           "{\"rms_norm_eps\": NaN}", "{\"rope_theta\": 1e999}", "\xff"}) {
    auto config = parse_model_config(text, "config.json");
    REQUIRE_FALSE(config);
    CHECK_THAT(config.error().message, Contains("config.json"));
  }
}

TEST_CASE("config: a folder is read, and generation_config.json overrides config.json", "[model][config]") {
  TempDir dir;
  auto write = [&](const char* file, const std::string& text) { std::ofstream(dir.path + "/" + file) << text; };
  auto missing = load_model_config(dir.path + "/nowhere");
  REQUIRE_FALSE(missing);
  CHECK(missing.error().code == ErrorCode::not_found);
  CHECK_THAT(missing.error().message, Contains("nowhere/config.json"));

  write("config.json", as_text(llama()));
  CHECK(need(load_model_config(dir.path + "//")).name == dir.path.substr(dir.path.rfind('/') + 1));
  write("generation_config.json", R"({"eos_token_id": [5, 6], "temperature": 0.6})");
  CHECK(load_model_config(dir.path).value().eos_tokens == std::vector<int>{5, 6});
  write("generation_config.json", R"({"bos_token_id": 9})");
  CHECK(load_model_config(dir.path).value().eos_tokens == std::vector<int>{2});
  CHECK(load_model_config(dir.path).value().bos_token == 9);
  for (const char* text : {R"({"eos_token_id": 5000})", "[]", "{"}) {
    write("generation_config.json", text);
    auto wrong = load_model_config(dir.path);
    REQUIRE_FALSE(wrong);
    CHECK_THAT(wrong.error().message, Contains("generation_config.json"));
  }
}

TEST_CASE("config: a model beyond this machine's memory is an error", "[model][config]") {
  json j = llama();
  j["hidden_size"] = 1 << 16;
  j["intermediate_size"] = 1 << 18;
  j["num_hidden_layers"] = 16;  // 1.2e12 parameters
  ThreadTeam team(1);
  auto weights = load_weights("", config_of(j), {.dtype = Dtype::bf16, .dummy = true}, team);
  REQUIRE_FALSE(weights);
  CHECK_THAT(weights.error().message, Contains("MB of memory"));
}

TEST_CASE("generation config: given values become defaults, and absent ones stay", "[model][config]") {
  TempDir dir;
  const auto load = [&](const std::string& text) {
    std::ofstream(dir.path + "/generation_config.json") << text;
    return load_generation_config(dir.path);
  };
  // No file, and an empty one.
  for (const SamplingParams& p : {need(load_generation_config(dir.path)), need(load("{}"))})
    CHECK((p.temperature == 1 && p.top_p == 1 && p.top_k == 0 && p.min_p == 0 && p.repetition_penalty == 1));
  // The file of Qwen2.5 Instruct, and min_p.
  const SamplingParams qwen = need(
      load(R"({"do_sample":true,"repetition_penalty":1.05,"temperature":0.7,"top_p":0.8,"top_k":20,"min_p":0.125})"));
  CHECK((qwen.temperature == 0.7f && qwen.top_p == 0.8f && qwen.top_k == 20 && qwen.min_p == 0.125f));
  CHECK(qwen.repetition_penalty == 1.05f);
  // Without do_sample decoding is greedy, whatever temperature the file has.
  CHECK(need(load(R"({"do_sample":false,"temperature":0.7})")).temperature == 0);
  CHECK(need(load(R"({"temperature":null,"top_k":-1,"do_sample":null})")).temperature == 1);
  for (const std::string field :
       {R"("temperature":-1)", R"("temperature":"hot")", R"("top_p":2)", R"("top_k":1.5)", R"("do_sample":1)"}) {
    INFO(field);
    const auto wrong = load("{" + field + "}");
    REQUIRE_FALSE(wrong);
    CHECK_THAT(wrong.error().message, Contains("generation_config.json"));
    CHECK_THAT(wrong.error().message, Contains(field.substr(1, field.find('"', 1) - 1)));
  }
  REQUIRE_FALSE(load("[]"));
}

}  // namespace xpyd::testing::config_test
