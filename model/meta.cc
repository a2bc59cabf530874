#include "model/meta.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/json/json.h"

namespace xpyd::model {
namespace {

constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"model.embed_tokens.", "tok_embeddings."},
    {"model.norm.", "norm."},
    {"lm_head.", "output."},
    {"model.layers.", "layers."},
    {".self_attn.q_proj.", ".attention.wq."},
    {".self_attn.k_proj.", ".attention.wk."},
    {".self_attn.v_proj.", ".attention.wv."},
    {".self_attn.o_proj.", ".attention.wo."},
    {".mlp.gate_proj.", ".feed_forward.w1."},
    {".mlp.down_proj.", ".feed_forward.w2."},
    {".mlp.up_proj.", ".feed_forward.w3."},
    {".input_layernorm.", ".attention_norm."},
    {".post_attention_layernorm.", ".ffn_norm."},
};

}  // namespace

std::string meta_name(std::string name) {
  for (const auto& [theirs, metas] : kNames)
    if (const size_t at = name.find(theirs); at != std::string::npos) name.replace(at, theirs.size(), metas);
  return name;
}

bool meta_reorders(std::string_view name) {
  return name.ends_with(".self_attn.q_proj.weight") || name.ends_with(".self_attn.k_proj.weight");
}

// Missing fields take the defaults of Meta's code; the MLP's width follows its formula.
Result<std::string> config_of_params(const std::string& json_text, const std::string& file_name) try {
  const nlohmann::json root = need(parse_json(json_text, file_name));
  if (!root.is_object()) return invalid(file_name + ": expected an object");
  JsonFields fields(root, file_name);
  const int64_t dim = fields.integer("dim", 1, 1 << 20), heads = fields.integer("n_heads", 1, 1 << 16);
  const int64_t multiple = fields.integer_or("multiple_of", 1, 1 << 20, 256);
  int64_t inner = 2 * (4 * dim) / 3;
  inner = int64_t(fields.number_or("ffn_dim_multiplier", 1e-6, 1e3, 1) * double(inner));
  inner = (inner + multiple - 1) / multiple * multiple;
  nlohmann::json config = {
      {"model_type", "llama"},
      {"hidden_size", dim},
      {"intermediate_size", inner},
      {"num_hidden_layers", fields.integer("n_layers", 1, 4096)},
      {"num_attention_heads", heads},
      {"num_key_value_heads", fields.integer_or("n_kv_heads", 1, 1 << 16, heads)},
      {"vocab_size", fields.integer("vocab_size", 1, 1 << 24)},  // Llama 2 has -1 here; the user must fill it in
      {"max_position_embeddings", fields.integer_or("max_seq_len", 1, 1 << 30, 2048)},
      {"rms_norm_eps", fields.number_or("norm_eps", 1e-30, 1, 1e-5)},
      {"rope_theta", fields.number_or("rope_theta", 1, 1e12, 10000)},
  };
  if (fields.boolean_or("use_scaled_rope", false))
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", fields.number_or("rope_scaling_factor", 1, 1e6, 8)},
                              {"low_freq_factor", 1},
                              {"high_freq_factor", fields.number_or("rope_high_freq_factor", 1e-6, 1e6, 4)},
                              {"original_max_position_embeddings", 8192}};
  if (const int64_t head_dim = fields.integer_or("head_dim", 1, 1 << 16, 0)) config["head_dim"] = head_dim;
  for (const char* key : {"moe", "moe_args", "sliding_window", "vision_chunk_size", "quantization_args", "lora_args"})
    if (fields.find(key)) return invalid(file_name + ": " + key + ": is not supported");
  return config.dump();
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::model
