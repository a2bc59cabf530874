// A model's shape, read from a Hugging Face config.json and generation_config.json. Thread safety: plain functions.
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

// How a folder stores its matrices: config.json's quantization_config.
struct Quantization {
  enum class Method { none, gptq, fp8 } method = Method::none;
  int group = 0;                          // gptq: inputs that share one scale; 0: a whole row
  bool act_order = false;                 // gptq: g_idx assigns inputs to groups (desc_act)
  bool zeros_less_one = true;             // gptq: stored zeros are one too small (all but "gptq_v2")
  int block_rows = 0, block_columns = 0;  // fp8: outputs x inputs that share one scale; 0: one per tensor or output
};

// A mixture of experts: the MLP of a sparse layer is `count` gated MLPs, of which each token uses `used` (model/moe).
struct Experts {
  int count = 0;                  // 0: every layer is dense
  int used = 0;                   // by one token
  int intermediate = 0;           // elements of an expert's inner layer
  bool renormalise = true;        // the weights of a token's used experts add up to 1 (norm_topk_prob)
  int sparse_step = 1;            // layer i is sparse if i + 1 is a multiple of it (decoder_sparse_step)
  std::vector<int> dense_layers;  // and i is not one of these (mlp_only_layers)
  // Expected number of distinct experts that n tokens of a layer use, if each token's choice is uniform and its own.
  double touched(double n_tokens) const;
};

struct ModelConfig {
  std::string family;    // config.json's model_type, such as "llama"; the table is in config.cc
  std::string name;      // the folder's last component, or "dummy"
  int n_layers = 0;      // layers with KV; the last n_predict are the multi-token head's
  int n_predict = 0;     // multi-token heads in use: 0 or 1
  int hidden = 0;        // elements of the residual stream
  int intermediate = 0;  // elements of a dense MLP's inner layer
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  int max_position = 0;  // tokens: the context length
  double rms_eps = 1e-5;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  int sliding_window = 0;  // tokens; 0 = none
  // First layer with the window (Qwen2's max_window_layers); 0: every layer has it.
  int window_from_layer = 0;
  int window(int layer) const { return layer >= window_from_layer ? sliding_window : 0; }
  bool qkv_bias = false;  // Qwen2
  bool o_bias = false;    // Llama with attention_bias
  bool mlp_bias = false;
  bool qk_norm = false;  // Qwen3: RMSNorm over head_dim of q and k, before RoPE
  bool tied_embeddings = false;
  Experts experts;
  bool sparse(int layer) const;  // the layer's MLP is a mixture of experts
  int sparse_layers() const;
  Quantization quantization;
  int n_predict_heads = 0;  // multi-token heads in the folder (DeepSeek-V3, section 2.2)
  // Layers without the multi-token head's.
  int trunk_layers() const { return n_layers - n_predict; }
  int bos_token = -1;           // -1: none
  std::vector<int> eos_tokens;  // generation ends at any of them; may be empty

  // Parameters in matrices and norms; tied embeddings count once.
  long parameters() const { return parameters(experts.count); }
  // Parameters that one token uses.
  long active_parameters() const { return parameters(experts.used); }

 private:
  long parameters(long n_experts) const;
};

// Puts the first multi-token head into use, as one more layer. Fails if the folder has none.
Status predict_next_tokens(ModelConfig& config);

// Reads DIR/config.json and, if present, DIR/generation_config.json. Every error names file, field and expected value.
Result<ModelConfig> load_model_config(const std::string& dir);
Result<ModelConfig> parse_model_config(const std::string& json_text, const std::string& file_name);

}  // namespace xpyd::model
