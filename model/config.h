// A model's shape, as read from a Hugging Face config.json (and generation_config.json).
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace xpyd::model {

struct RopeScaling {
  enum class Kind { none, linear, llama3 } kind = Kind::none;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  int original_max_position = 0;                     // llama3, tokens
};

// How a folder's matrices are kept: config.json's quantization_config.
struct Quantization {
  enum class Method { none, gptq, fp8 } method = Method::none;
  int group = 0;               // gptq: inputs with one scale; 0: all
  bool act_order = false;      // gptq: groups in any order, which g_idx says (desc_act)
  bool zeros_less_one = true;  // gptq: stored zeros are one less than those that are meant (all but "gptq_v2")
  int block_rows = 0, block_columns = 0;  // fp8: outputs x inputs with one scale; 0: of the tensor, or of an output
};

// How folders name a multi-token head (DeepSeek-V3, section 2.2): a layer, and what joins the hidden state of a token
// with the embedding of the next one for it.
struct PredictNames {
  const char* key;     // of config.json: how many heads there are
  const char* prefix;  // null: that of the layer behind the last one
  const char* layer;   // below the prefix
  const char *join, *embedding_norm, *hidden_norm, *norm;
};

struct ModelConfig {
  std::string family;  // "llama", "mistral", "qwen2", "qwen3": config.json's model_type
  std::string name;    // the folder's last component, or "dummy"
  int n_layers = 0;      // of KV: n_predict of them are the last ones
  int n_predict = 0;     // multi-token heads in use: 0 or 1
  int hidden = 0;        // elements of the residual stream
  int intermediate = 0;  // elements of the MLP's inner layer
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  int max_position = 0;  // tokens: the context length
  double rms_eps = 1e-5;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  int sliding_window = 0;  // tokens; 0 = none
  // The first layer that uses the window (Qwen2's max_window_layers); 0 = all layers do.
  int window_from_layer = 0;
  int window(int layer) const { return layer >= window_from_layer ? sliding_window : 0; }
  bool qkv_bias = false;  // Qwen2
  bool o_bias = false;    // Llama with attention_bias
  bool mlp_bias = false;
  bool qk_norm = false;  // Qwen3: RMSNorm over head_dim of q and k, before RoPE
  bool tied_embeddings = false;
  Quantization quantization;
  const PredictNames* predict_names = nullptr;  // null: the folder has no multi-token heads
  int trunk_layers() const { return n_layers - n_predict; }
  int bos_token = -1;           // -1: none
  std::vector<int> eos_tokens;  // generation ends at any of them; may be empty

  // Parameters in the matrices and norms (tied embeddings counted once).
  long parameters() const;
};

// Puts the first multi-token head into use, as one more layer. The error: the folder has none.
Status predict_next_tokens(ModelConfig& config);

// Reads DIR/config.json and, where present, DIR/generation_config.json. Every error names the file and the field, and
// what was expected. Absurd sizes (any product beyond 2^40) are errors, not allocations.
Result<ModelConfig> load_model_config(const std::string& dir);
Result<ModelConfig> parse_model_config(const std::string& json_text, const std::string& file_name);

}  // namespace xpyd::model
