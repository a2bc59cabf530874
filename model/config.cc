#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/folder.h"

namespace xpyd::model {
namespace {

using nlohmann::json;

// Defaults of a family's Hugging Face configuration class, for fields that config.json leaves out.
struct Family {
  const char* model_type;
  bool qkv_bias;            // always present
  bool attention_bias_key;  // `attention_bias` switches the biases of q, k, v and o
  bool mlp_bias_key;
  bool qk_norm;
  bool kv_heads_default;          // num_key_value_heads may be missing and is then n_heads
  int head_dim_default;           // 0: hidden / n_heads
  int window_default;             // sliding_window if the key is missing; 0: no window; kNoWindow: the key is ignored
  bool window_switch;             // use_sliding_window (default false) and max_window_layers apply
  const char* experts = nullptr;  // the key of the number of experts; null: every layer is dense
  double rms_eps = 1e-6, rope_theta = 1e4;
};
constexpr int kNoWindow = -1;

constexpr Family kFamilies[] = {
    {"llama", false, true, true, false, true, 0, kNoWindow, false},
    {"mistral", false, false, false, false, false, 0, 4096, false},
    {"mixtral", false, false, false, false, false, 0, 0, false, "num_local_experts", 1e-5, 1e6},
    {"qwen2", true, false, false, false, false, 0, 4096, true},
    {"qwen3", false, true, false, true, false, 128, 4096, true},
    {"qwen3_moe", false, true, false, true, false, 0, kNoWindow, false, "num_experts"},
};

// Families with experts that need more than model/moe has.
constexpr struct {
  const char *model_type, *lacks;
} kRefused[] = {
    {"qwen2_moe", "shared experts"},
    {"qwen3_next", "shared experts and linear attention"},
    {"deepseek", "shared experts"},
    {"deepseek_v2", "shared experts and latent attention"},
    {"deepseek_v3", "shared experts, latent attention and groups of experts"},
    {"gpt_oss", "attention sinks, biased experts and their MXFP4 weights"},
};

constexpr const char* kPredictLayers = "num_nextn_predict_layers";

Error wrong(const std::string& file, const std::string& field, const std::string& what) {
  return invalid(file + ": " + field + ": " + what);
}

json read_object(const std::string& text, const std::string& file) {
  json root = need(parse_json(text, file));
  if (!root.is_object()) throw invalid(file + ": expected an object");
  return root;
}

// Quotes a string from outside for a message.
std::string shown(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text.substr(0, 60)) quoted += (unsigned(c) & 0xff) < 0x20 ? '?' : c;
  return quoted + "\"";
}

void read_rope(const json& root, const Family& family, const std::string& file, ModelConfig& config) {
  // Transformers 5 writes one object, rope_parameters. Earlier versions write rope_theta beside rope_scaling, which may
  // be null.
  const bool newer = find_field(root, "rope_parameters") != nullptr;
  const std::string key = newer ? "rope_parameters" : "rope_scaling";
  const json* scaling = find_field(root, key);
  JsonFields top(root, file);
  config.rope_theta = top.number_or("rope_theta", 1, 1e12, family.rope_theta);
  if (top.number_or("partial_rotary_factor", 0, 1, 1) != 1)
    throw wrong(file, "partial_rotary_factor", "only 1 is supported");
  if (!scaling) return;
  if (!scaling->is_object()) throw wrong(file, key, "expected an object");

  JsonFields fields(*scaling, file + ": " + key);
  config.rope_theta = fields.number_or("rope_theta", 1, 1e12, config.rope_theta);
  std::string kind = fields.string_or("rope_type", fields.string_or("type", "default"));
  if (fields.number_or("partial_rotary_factor", 0, 1, 1) != 1)
    throw wrong(file, key + ".partial_rotary_factor", "only 1 is supported");
  RopeScaling& rope = config.rope_scaling;
  if (kind == "default") return;
  if (kind == "linear") {
    rope.kind = RopeScaling::Kind::linear;
    rope.factor = fields.number("factor", 1, 1e6);
  } else if (kind == "llama3") {
    rope.kind = RopeScaling::Kind::llama3;
    rope.factor = fields.number("factor", 1, 1e6);
    rope.low_freq_factor = fields.number("low_freq_factor", 1e-6, 1e6);
    rope.high_freq_factor = fields.number("high_freq_factor", 1e-6, 1e6);
    rope.original_max_position = int(fields.integer("original_max_position_embeddings", 1, int64_t{1} << 30));
    if (rope.high_freq_factor <= rope.low_freq_factor)
      throw wrong(file, key + ".high_freq_factor", "expected more than low_freq_factor");
  } else {
    throw wrong(file, key + ".rope_type", shown(kind) + " is not supported (expected default, linear or llama3)");
  }
}

void read_window(const json& root, const Family& family, const std::string& file, ModelConfig& config) {
  JsonFields fields(root, file);
  if (family.window_default == kNoWindow) return;
  auto given = root.find("sliding_window");
  int window = family.window_default;
  if (given != root.end()) window = given->is_null() ? 0 : int(fields.integer("sliding_window", 1, int64_t{1} << 30));
  int from_layer = 0;
  if (family.window_switch) {
    if (!fields.boolean_or("use_sliding_window", false)) window = 0;
    from_layer = int(fields.integer_or("max_window_layers", 0, 1 << 20, 28));
  }
  if (from_layer >= config.n_layers) window = 0;
  config.sliding_window = window;
  config.window_from_layer = window ? from_layer : 0;
  const json* types = find_field(root, "layer_types");  // Transformers 5 also lists each layer's kind
  for (int i = 0; types && i < config.n_layers; ++i)
    if (!types->is_array() || types->size() != size_t(config.n_layers) ||
        ((*types)[size_t(i)] == "sliding_attention") != (config.window(i) > 0))
      throw wrong(file, "layer_types", "differs from sliding_window and max_window_layers");
}

void read_experts(const json& root, const Family& family, const std::string& file, ModelConfig& config) {
  for (const char* key : {"n_shared_experts", "shared_expert_intermediate_size"})
    if (const json* shared = find_field(root, key); shared && *shared != 0)
      throw wrong(file, key, "shared experts are not supported");
  if (!family.experts) return;
  JsonFields fields(root, file);
  Experts& experts = config.experts;
  constexpr const char* kNewer = "num_local_experts";  // Transformers 5 writes it for every family
  const bool newer = !find_field(root, family.experts) && find_field(root, kNewer);
  experts.count = int(fields.integer(newer ? kNewer : family.experts, 1, 1 << 12));
  experts.used = int(fields.integer("num_experts_per_tok", 1, experts.count));
  experts.intermediate = config.intermediate;
  if (fields.integer_or(kPredictLayers, 0, 64, 0) > 0)
    throw wrong(file, kPredictLayers, "not supported beside experts");
  if (config.family != "qwen3_moe") return;
  experts.intermediate = int(fields.integer("moe_intermediate_size", 1, 1 << 24));
  experts.renormalise = fields.boolean_or("norm_topk_prob", false);
  experts.sparse_step = int(fields.integer_or("decoder_sparse_step", 1, 1 << 12, 1));
  // Versions of Hugging Face's class differ in the layers that have the window.
  if (fields.boolean_or("use_sliding_window", false))
    throw wrong(file, "use_sliding_window", "true is not supported for qwen3_moe");
  const json* dense = find_field(root, "mlp_only_layers");
  if (!dense) return;
  if (!dense->is_array() || dense->size() > size_t(config.n_layers))
    throw wrong(file, "mlp_only_layers", "expected a list of layers");
  for (const json& layer : *dense) {
    if (!layer.is_number_integer() || !(layer >= 0) || !(layer < config.n_layers))
      throw wrong(file, "mlp_only_layers", "expected layers from 0 to " + std::to_string(config.n_layers - 1));
    experts.dense_layers.push_back(layer.get<int>());
  }
}

// Supports two methods: GPTQ with 4 bits, and FP8 with scales per tensor, per output or per block.
void read_quantization(const json& root, const std::string& file, ModelConfig& config) {
  const json* given = find_field(root, "quantization_config");
  if (!given) return;
  const std::string where = file + ": quantization_config";
  if (!given->is_object()) throw invalid(where + ": expected an object");
  JsonFields fields(*given, where);
  const std::string method = fields.string("quant_method");
  Quantization& q = config.quantization;
  if (method == "gptq") {
    q.method = Quantization::Method::gptq;
    if (const int bits = int(fields.integer("bits", 1, 64)); bits != 4)
      throw invalid(where + ".bits: " + std::to_string(bits) + " is not supported (expected 4)");
    const auto group = fields.integer("group_size", -1, 1 << 20);
    q.group = group <= 0 ? 0 : int(group);
    const std::string format = fields.string_or("checkpoint_format", "gptq");
    if (format != "gptq" && format != "gptq_v2")
      throw invalid(where + ".checkpoint_format: " + shown(format) + " is not supported (expected gptq or gptq_v2)");
    q.zeros_less_one = format == "gptq";
    q.act_order = fields.boolean_or("desc_act", false);
  } else if (method == "fp8") {
    q.method = Quantization::Method::fp8;
    if (const std::string format = fields.string_or("fmt", "e4m3"); format != "e4m3")
      throw invalid(where + ".fmt: " + shown(format) + " is not supported (expected e4m3)");
    if (const json* block = find_field(*given, "weight_block_size")) {
      if (!block->is_array() || block->size() != 2) throw invalid(where + ".weight_block_size: expected two numbers");
      for (size_t i = 0; i < 2; ++i) {
        const json& n = (*block)[i];
        if (!n.is_number_unsigned() || !(n > 0) || !(n <= 1 << 20))
          throw invalid(where + ".weight_block_size: expected two numbers from 1 to 1048576");
        (i == 0 ? q.block_rows : q.block_columns) = n.get<int>();
      }
    }
  } else {
    throw invalid(where + ".quant_method: " + shown(method) + " is not supported (expected gptq or fp8)");
  }
}

// Reads one token id.
void read_token(const json& value, const std::string& where, int vocab, int& token) {
  if (!value.is_number_integer() || !(value >= 0) || !(value < vocab))
    throw invalid(where + ": expected a token id from 0 to " + std::to_string(vocab - 1));
  token = value.get<int>();
}

// Reads bos_token_id and eos_token_id of config.json or generation_config.json.
void read_special_tokens(const json& root, const std::string& file, ModelConfig& config) {
  if (const json* bos = find_field(root, "bos_token_id"))
    read_token(*bos, file + ": bos_token_id", config.vocab, config.bos_token);
  const json* eos = find_field(root, "eos_token_id");
  if (!eos) return;
  config.eos_tokens.clear();
  const std::string where = file + ": eos_token_id";
  if (eos->is_array() && eos->size() > 256) throw invalid(where + ": expected at most 256 tokens");
  const json list = eos->is_array() ? *eos : json::array({*eos});
  for (const json& value : list) {
    int token = -1;
    read_token(value, where, config.vocab, token);
    if (std::find(config.eos_tokens.begin(), config.eos_tokens.end(), token) == config.eos_tokens.end())
      config.eos_tokens.push_back(token);
  }
}

const Family& find_family(const json& root, const std::string& file) {
  const std::string type = need(get_string(root, "model_type", file));
  const Family* family = nullptr;
  for (const Family& f : kFamilies)
    if (type == f.model_type) family = &f;
  for (const auto& refused : kRefused)
    if (type == refused.model_type)
      throw wrong(file, "model_type", shown(type) + " is not supported: there are no " + refused.lacks);
  if (!family)
    throw wrong(file, "model_type",
                shown(type) + " is not supported (expected llama, mistral, mixtral, qwen2, qwen3 or qwen3_moe)");
  if (family->experts) return *family;
  for (const char* key : {"num_local_experts", "num_experts", "moe_intermediate_size"})
    if (find_field(root, key))
      throw wrong(file, key, "a " + type + " model has no experts (expected model_type mixtral or qwen3_moe)");
  return *family;
}

}  // namespace

double Experts::touched(double n_tokens) const { return count * (1 - std::pow(1 - double(used) / count, n_tokens)); }

bool ModelConfig::sparse(int layer) const {
  return experts.count > 0 && (layer + 1) % experts.sparse_step == 0 &&
         std::find(experts.dense_layers.begin(), experts.dense_layers.end(), layer) == experts.dense_layers.end();
}

int ModelConfig::sparse_layers() const {
  int n = 0;
  for (int i = 0; i < n_layers; ++i) n += sparse(i);
  return n;
}

long ModelConfig::parameters(long n_experts) const {
  const long h = hidden, q = long(n_heads) * head_dim, kv = long(n_kv_heads) * head_dim;
  const long n_sparse = sparse_layers();
  long layer = h * (q + 2 * kv) + q * h + 2 * h;
  if (qkv_bias) layer += q + 2 * kv;
  if (o_bias) layer += h;
  if (mlp_bias) layer += 2L * intermediate + h;
  if (qk_norm) layer += 2L * head_dim;
  return n_layers * layer + (n_layers - n_sparse) * 3 * h * intermediate +
         n_sparse * (h * experts.count + n_experts * 3 * h * experts.intermediate) + n_predict * (2 * h * h + 3 * h) +
         h + long(vocab) * h * (tied_embeddings ? 1 : 2);
}

Result<ModelConfig> parse_model_config(const std::string& json_text, const std::string& file) try {
  const json root = read_object(json_text, file);
  const Family& family = find_family(root, file);

  ModelConfig config;
  config.family = family.model_type;
  JsonFields fields(root, file);
  config.n_layers = int(fields.integer("num_hidden_layers", 1, 4096));
  config.hidden = int(fields.integer("hidden_size", 1, 1 << 20));
  config.intermediate = int(fields.integer("intermediate_size", 1, 1 << 24));
  config.n_heads = int(fields.integer("num_attention_heads", 1, 1 << 16));
  config.n_kv_heads = int(family.kv_heads_default ? fields.integer_or("num_key_value_heads", 1, 1 << 16, config.n_heads)
                                                  : fields.integer("num_key_value_heads", 1, 1 << 16));
  config.vocab = int(fields.integer("vocab_size", 1, 1 << 24));
  config.max_position = int(fields.integer("max_position_embeddings", 1, 1 << 30));
  config.rms_eps = fields.number_or("rms_norm_eps", 1e-30, 1, family.rms_eps);
  config.tied_embeddings = fields.boolean_or("tie_word_embeddings", false);
  const std::string activation = fields.string_or("hidden_act", "silu");
  const bool bias = family.attention_bias_key && fields.boolean_or("attention_bias", false);
  config.qkv_bias = family.qkv_bias || bias;
  config.o_bias = bias;
  config.mlp_bias = family.mlp_bias_key && fields.boolean_or("mlp_bias", false);
  config.qk_norm = family.qk_norm;

  if (find_field(root, "head_dim") || family.head_dim_default) {
    config.head_dim = int(fields.integer_or("head_dim", 1, 1 << 14, family.head_dim_default));
  } else {
    if (config.hidden % config.n_heads != 0)
      throw wrong(file, "head_dim", "missing, and hidden_size is not a multiple of num_attention_heads");
    config.head_dim = config.hidden / config.n_heads;
  }
  if (config.head_dim % 2 != 0 || config.head_dim > 1 << 14)
    throw wrong(file, "head_dim",
                std::to_string(config.head_dim) + ": expected an even number up to 16384 (RoPE rotates pairs)");
  if (config.n_heads % config.n_kv_heads != 0)
    throw wrong(
        file, "num_key_value_heads",
        std::to_string(config.n_kv_heads) + " does not divide num_attention_heads " + std::to_string(config.n_heads));
  if (activation != "silu" && activation != "swish")
    throw wrong(file, "hidden_act", shown(activation) + " is not supported (expected silu)");

  if (int64_t(config.n_heads) * config.head_dim > 1 << 24)
    throw wrong(file, "num_attention_heads * head_dim", "exceeds 2^24");

  read_rope(root, family, file, config);
  read_window(root, family, file, config);
  read_experts(root, family, file, config);
  // The product of sizes that are each in their range; parameters() counts in 63 bits.
  if (double(config.n_layers) * config.experts.count * config.experts.intermediate * config.hidden > 0x1p60)
    throw wrong(file, "moe_intermediate_size", "the experts of all layers have more than 2^60 parameters");
  read_quantization(root, file, config);
  read_special_tokens(root, file, config);
  config.n_predict_heads = int(fields.integer_or(kPredictLayers, 0, 64, 0));
  return config;
} catch (const Error& error) {
  return error;
}

Status predict_next_tokens(ModelConfig& config) {
  if (config.n_predict_heads == 0)
    return invalid("model " + config.name + " has no multi-token prediction head: its config.json has no " +
                   kPredictLayers);
  config.n_predict = 1;
  ++config.n_layers;
  return ok();
}

Result<ModelConfig> load_model_config(const std::string& dir) try {
  constexpr size_t kMaxBytes = 16u << 20;
  const std::string file = dir + "/config.json";
  ModelConfig config = need(parse_model_config(need(read_model_file(file, kMaxBytes)), file));

  std::string folder = dir;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  config.name = folder.substr(folder.rfind('/') + 1);

  // Special tokens of generation_config.json take precedence: Llama 3 Instruct lists there the tokens that end a chat
  // turn.
  const std::string generation = dir + "/generation_config.json";
  Result<std::string> text = read_model_file(generation, kMaxBytes);
  if (text)
    read_special_tokens(read_object(text.value(), generation), generation, config);
  else if (text.error().code != ErrorCode::not_found)
    throw text.error();
  return config;
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::model
