// Checkpoint -> Weights. Each tensor is looked up when it is asked for, and its rows are streamed into the packed
// matrices, so that only a few rows are in memory beside the packed bytes.
#include "model/weights/weights.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <optional>
#include <set>
#include <string>

#include "base/numbers.h"
#include "base/random.h"
#include "model/weights/safetensors.h"
#include "model/weights/weight_source.h"

namespace xpyd::model {
namespace {

struct TensorSpec {
  std::string name;
  int rows, cols;  // a vector has one row
  bool matrix;
};

std::string layer_prefix(int layer) { return "model.layers." + std::to_string(layer) + "."; }

// The layer in a tensor's name; -1: none.
int layer_of(std::string_view name) {
  int layer = -1;
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return -1;
  name.remove_prefix(kLayers.size());
  return read_number(name.substr(0, name.find('.')), layer) ? layer : -1;
}

bool all_zero(const Checkpoint& checkpoint, std::string_view name) {
  const TensorEntry& entry = *checkpoint.entry(name);
  const auto found = checkpoint.find(name, entry.shape);
  if (!found || entry.shape.size() != 1) return false;
  std::vector<float> values(size_t(entry.shape[0]));
  return found.value().read(0, int(entry.shape[0]), values.data()).ok() &&
         std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
}

// A tensor of these layers that nothing read would change the model's meaning, as a bias or an adapter does.
Status check_unused(const Checkpoint& checkpoint, const ModelConfig& config, Range layers,
                    const std::set<std::string, std::less<>>& used) {
  const bool whole = layers.begin == 0 && layers.end == config.n_layers;
  for (std::string_view name : checkpoint.names()) {
    if (used.count(name) || (name == "lm_head.weight" && config.tied_embeddings)) continue;
    if (name.ends_with(".rotary_emb.inv_freq")) continue;  // old files; follows from config.json
    const int layer = layer_of(name);
    // The last stage also judges the layers that config.json does not have.
    const int end = layers.end == config.n_layers ? INT_MAX : layers.end;
    if (!whole && !(layers.begin <= layer && layer < end)) continue;
    // Unused heads, and a head's copies of the trunk's embedding or lm_head, which all heads share.
    if (layer >= config.trunk_layers() && layer < config.trunk_layers() + config.n_predict_heads) continue;
    // GPTQ's tools write zero biases for matrices that have none.
    if (config.quantization.method == Quantization::Method::gptq && name.ends_with(".bias") &&
        all_zero(checkpoint, name))
      continue;
    return checkpoint.unexpected(name, config.family);
  }
  return ok();
}

// Seeded random rows for speed runs. Matrices are uniform with variance 1 / columns, so that activations keep their
// size through the layers. Norms are about 1, biases about 0. A row depends on the seed, the tensor's name and the row
// only.
WeightSource dummy_source(const TensorSpec& spec, uint64_t seed) {
  uint64_t name_hash = 0xcbf29ce484222325u;  // FNV-1a
  for (char c : spec.name) name_hash = (name_hash ^ uint64_t(c)) * 0x100000001b3u;
  const bool norm = !spec.matrix && spec.name.ends_with("weight");
  const float centre = norm ? 1 : 0;
  const float half_width = spec.matrix ? std::sqrt(3.0f / float(spec.cols)) : 0.1f;
  return {.rows = [=, cols = spec.cols](int row, float* out) {
    Random random(Random(seed ^ name_hash ^ (uint64_t(row) << 32)).next());
    const float scale = half_width * 0x1p-31f;
    for (int i = 0; i < cols; i += 2) {
      const uint64_t bits = random.next();
      out[i] = centre + scale * float(int32_t(bits));
      if (i + 1 < cols) out[i + 1] = centre + scale * float(int32_t(bits >> 32));
    }
  }};
}

// Loads the tensors that build() asks for.
class WeightLoader {
 public:
  // `checkpoint`: null for dummy weights. folder_codes: the folder has a quantisation of its own, and its dense
  // matrices stay dense.
  WeightLoader(const Checkpoint* checkpoint, const ModelConfig& config, const LoadOptions& options, Dtype matrices,
               bool folder_codes, ReadErrors& errors, ThreadTeam& team)
      : checkpoint_(checkpoint),
        config_(config),
        options_(options),
        matrices_(matrices),
        folder_codes_(folder_codes),
        errors_(errors),
        team_(team) {}
  const std::set<std::string, std::less<>>& used() const { return used_; }

  struct Part {
    std::string name;
    int rows;
  };
  // Packs the parts' rows, stacked. The function stays whole because its four ways to pack share the parts.
  // `kept`: the matrix's dtype in memory, whatever the options say.
  PackedMatrix matrix(const std::vector<Part>& parts, int cols, int k_groups, std::optional<Dtype> kept = {}) {
    int rows = 0;
    std::vector<std::pair<int, WeightSource>> starts;
    for (const Part& part : parts) {
      starts.emplace_back(rows, source({part.name + ".weight", part.rows, cols, true}));
      rows += part.rows;
    }
    if (!errors_.first()) return {};
    const auto at = [&starts](int row) -> const std::pair<int, WeightSource>& {
      return *std::prev(
          std::upper_bound(starts.begin(), starts.end(), row, [](int r, const auto& s) { return r < s.first; }));
    };
    const auto read = [&](int row, float* out) {
      const auto& [first, from] = at(row);
      from.rows(row - first, out);
    };
    const auto name_of = [&](int row) {
      for (size_t i = parts.size() - 1;; --i)
        if (starts[i].first <= row) return parts[i].name;
    };
    std::vector<std::shared_ptr<CodeSource>> codes;
    for (const auto& [first, from] : starts)
      if (from.codes) codes.push_back(from.codes);
    for (const auto& c : codes) errors_.keep(c->open());
    if (!errors_.first()) return {};
    const bool all = codes.size() == starts.size();
    const Dtype dtype = kept.value_or(folder_codes_ && codes.empty() ? options_.dtype : matrices_);
    const bool as_it_is = std::all_of(starts.begin(), starts.end(),
                                      [&](const auto& s) { return s.second.elements && s.second.dtype == dtype; });
    // Quantising again would change the folder's codes, and would quantise what the folder left dense.
    if (is_quantised(dtype) && !codes.empty() && !all)
      for (size_t i = 0; i < parts.size(); ++i)
        if (!starts[i].second.codes)
          errors_.keep(invalid("tensor \"" + parts[i].name +
                               ".weight\": it is not quantised, but other tensors of the same fused matrix are; use "
                               "--weight-dtype f32 or bf16"));
    if (!errors_.first()) return {};
    PackedMatrix packed;
    if (as_it_is) {
      packed = pack_elements(
          rows, cols, k_groups, dtype,
          [&](int row, std::byte* out) {
            const auto& [first, from] = at(row);
            from.elements(row - first, out);
          },
          team_);
    } else if (!is_quantised(dtype)) {
      packed = pack_matrix(
          rows, cols, k_groups, dtype,
          [&](int row, float* out) {
            read(row, out);
            if (dtype == Dtype::f16 && std::any_of(out, out + cols, [](float x) { return std::abs(x) >= 65520; }))
              errors_.keep(invalid("tensor \"" + name_of(row) + ".weight\": a weight exceeds the range of f16"));
          },
          team_);
    } else if (all && codes[0]->dtype == dtype) {
      for (size_t i = 1; i < codes.size(); ++i)
        if (codes[i]->groups != codes[0]->groups)
          errors_.keep(invalid("tensor \"" + parts[i].name + ".g_idx\": its groups differ from those of \"" +
                               parts[0].name + ".g_idx\", which is part of the same fused matrix"));
      if (!errors_.first()) return {};
      packed = pack_codes(
          rows, cols, k_groups, dtype, codes[0]->groups,
          [&](int row, QuantRow& out) {
            const auto& [first, from] = at(row);
            from.codes->read(row - first, out);
          },
          team_);
    } else {
      const QuantGroups groups = made_groups(dtype, options_.weight_group, cols);
      packed = pack_codes(
          rows, cols, k_groups, dtype, groups,
          [&](int row, QuantRow& out) {
            std::vector<float> values(static_cast<size_t>(cols));
            read(row, values.data());
            if (!quantise_row(dtype, groups, values.data(), out))
              errors_.keep(invalid("tensor \"" + name_of(row) +
                                   ".weight\": a weight is not finite or too large, so it cannot be converted to " +
                                   dtype_name(dtype)));
          },
          team_);
    }
    for (const auto& c : codes) c->close();
    return packed;
  }
  std::vector<float> vector(const std::vector<Part>& parts) {
    std::vector<float> values;
    for (const Part& part : parts) {
      const WeightSource from = source({part.name, 1, part.rows, false});
      if (!errors_.first()) return {};
      values.resize(values.size() + size_t(part.rows));
      from.rows(0, values.data() + values.size() - size_t(part.rows));
    }
    return values;
  }
  Buffer table(const std::string& name, int rows, int cols) {
    const WeightSource from = source({name, rows, cols, true});
    if (!errors_.first()) return {};
    const bool f32 = options_.dtype == Dtype::f32, raw = !f32 && from.elements && from.dtype == Dtype::bf16;
    Buffer table(size_t(rows) * size_t(cols) * dtype_bytes(options_.dtype));
    if (from.codes) errors_.keep(from.codes->open());
    if (!errors_.first()) return {};
    team_.run([&](int rank) {
      std::vector<float> values(static_cast<size_t>(cols));
      Range mine = share(rows, rank, team_.size());
      for (int row = mine.begin; row < mine.end; ++row) {
        const size_t first = size_t(row) * size_t(cols);
        if (raw)
          from.elements(row, reinterpret_cast<std::byte*>(table.as<bf16>() + first));
        else
          from.rows(row, f32 ? table.as<float>() + first : values.data());
        if (!f32 && !raw) std::transform(values.begin(), values.end(), table.as<bf16>() + first, to_bf16);
      }
    });
    if (from.codes) from.codes->close();
    return table;
  }

 private:
  // Finds a tensor. A failure is kept in errors_.
  WeightSource source(const TensorSpec& spec) {
    if (checkpoint_ == nullptr) return dummy_source(spec, options_.seed);
    constexpr std::string_view kWeight = ".weight";
    Result<WeightSource> found = spec.matrix
                                     ? matrix_source(*checkpoint_, config_.quantization,
                                                     spec.name.substr(0, spec.name.size() - kWeight.size()), spec.rows,
                                                     spec.cols, errors_, used_)
                                     : dense_source(*checkpoint_, spec.name, {spec.cols}, spec.cols, errors_, used_);
    if (found) return std::move(found).value();
    errors_.keep(found.error());
    return {};
  }

  const Checkpoint* const checkpoint_;
  const ModelConfig& config_;
  const LoadOptions& options_;
  const Dtype matrices_;
  const bool folder_codes_;
  ReadErrors& errors_;
  ThreadTeam& team_;
  std::set<std::string, std::less<>> used_;  // names of tensors
};

// The MLP of a sparse layer. The router is in f32, because a rounded score would choose another expert.
void load_experts(const ModelConfig& c, const std::string& prefix, WeightLoader& loader, LayerWeights& layer) {
  const bool mixtral = c.family == "mixtral";
  const std::string block = prefix + (mixtral ? "block_sparse_moe." : "mlp.");
  layer.router = loader.matrix({{block + "gate", c.experts.count}}, c.hidden, 1, Dtype::f32);
  layer.experts.resize(size_t(c.experts.count));
  for (size_t e = 0; e < layer.experts.size(); ++e) {
    const std::string at = block + "experts." + std::to_string(e) + ".";
    const int inner = c.experts.intermediate;
    layer.experts[e].gate_up = loader.matrix(
        {{at + (mixtral ? "w1" : "gate_proj"), inner}, {at + (mixtral ? "w3" : "up_proj"), inner}}, c.hidden, 1);
    layer.experts[e].down = loader.matrix({{at + (mixtral ? "w2" : "down_proj"), c.hidden}}, inner, kRowParallelGroups);
  }
}

// Asks the loader for every tensor of this configuration, by Hugging Face's names, in the layers `of`.
std::shared_ptr<Weights> build(const ModelConfig& c, Dtype dtype, WeightLoader& loader, Range of) {
  const auto wanted = [&](int layer) { return of.begin <= layer && layer < of.end; };
  auto weights = std::make_shared<Weights>();
  weights->config = c;
  weights->dtype = dtype;
  weights->rope_freqs = rope_frequencies(c);
  if (wanted(0)) weights->embedding = loader.table("model.embed_tokens.weight", c.vocab, c.hidden);
  const int q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  weights->layers.resize(size_t(c.n_layers));
  for (int i = 0; i < c.n_layers; ++i) {
    if (!wanted(i)) continue;
    LayerWeights& layer = weights->layers[size_t(i)];
    const std::string prefix = layer_prefix(i);
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    layer.qkv = loader.matrix({{attention + "q_proj", q}, {attention + "k_proj", kv}, {attention + "v_proj", kv}},
                              c.hidden, 1);
    layer.o = loader.matrix({{attention + "o_proj", c.hidden}}, q, kRowParallelGroups);
    if (c.sparse(i)) {
      load_experts(c, prefix, loader, layer);
    } else {
      layer.gate_up = loader.matrix({{mlp + "gate_proj", c.intermediate}, {mlp + "up_proj", c.intermediate}}, c.hidden,
                                    1);
      layer.down = loader.matrix({{mlp + "down_proj", c.hidden}}, c.intermediate, kRowParallelGroups);
    }
    layer.attention_norm = loader.vector({{prefix + "input_layernorm.weight", c.hidden}});
    layer.mlp_norm = loader.vector({{prefix + "post_attention_layernorm.weight", c.hidden}});
    if (c.qkv_bias)
      layer.qkv_bias = loader.vector(
          {{attention + "q_proj.bias", q}, {attention + "k_proj.bias", kv}, {attention + "v_proj.bias", kv}});
    if (c.o_bias) layer.o_bias = loader.vector({{attention + "o_proj.bias", c.hidden}});
    if (c.qk_norm) {
      layer.q_norm = loader.vector({{attention + "q_norm.weight", c.head_dim}});
      layer.k_norm = loader.vector({{attention + "k_norm.weight", c.head_dim}});
    }
    if (c.mlp_bias) {
      layer.gate_up_bias = loader.vector(
          {{mlp + "gate_proj.bias", c.intermediate}, {mlp + "up_proj.bias", c.intermediate}});
      layer.down_bias = loader.vector({{mlp + "down_proj.bias", c.hidden}});
    }
  }
  if (!wanted(c.n_layers - 1)) return weights;
  if (c.n_predict) {
    const std::string prefix = layer_prefix(c.trunk_layers());
    const auto norm = [&](const char* name) { return loader.vector({{prefix + name + ".weight", c.hidden}}); };
    weights->head.join = loader.matrix({{prefix + "eh_proj", c.hidden}}, 2 * c.hidden, 1);
    weights->head.embedding_norm = norm("enorm");
    weights->head.hidden_norm = norm("hnorm");
    weights->head.norm = norm("shared_head.norm");
  }
  weights->final_norm = loader.vector({{"model.norm.weight", c.hidden}});
  weights->lm_head = loader.matrix({{c.tied_embeddings ? "model.embed_tokens" : "lm_head", c.vocab}}, c.hidden, 1);
  return weights;
}

// A model that cannot fit is an error of the input, reported before any allocation.
Status check_memory(const ModelConfig& c, Dtype table, Dtype dtype, int group, Range layers) {
  const double head = double(c.vocab) * c.hidden * (layers.end == c.n_layers);
  const double matrices = double(c.parameters()) - double(c.vocab) * c.hidden * (c.tied_embeddings ? 1 : 2);
  const double needed = (matrices * (layers.end - layers.begin) / c.n_layers + head) * stored_bits(dtype, group) / 8 +
                        double(c.vocab) * c.hidden * (layers.begin == 0) * double(dtype_bytes(table));
  const double machine = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
  if (needed < machine) return ok();
  return invalid("model " + c.name + ": the weights need " + std::to_string(long(needed / 1e6)) + " MB in " +
                 dtype_name(dtype) + ", but this machine has " + std::to_string(long(machine / 1e6)) + " MB of memory");
}

}  // namespace

QuantGroups made_groups(Dtype dtype, int weight_group, int columns) {
  return even_groups(columns, weight_group > 0 ? weight_group : dtype == Dtype::int4 ? 128 : 0);
}

Dtype matrix_dtype(const ModelConfig& config, const LoadOptions& options) {
  if (options.weight_dtype) return *options.weight_dtype;
  if (options.dummy || config.quantization.method == Quantization::Method::none) return options.dtype;
  return config.quantization.method == Quantization::Method::gptq ? Dtype::int4 : Dtype::fp8;
}

std::vector<double> rope_frequencies(const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  std::vector<double> freqs(size_t(config.head_dim / 2));
  for (size_t i = 0; i < freqs.size(); ++i) {
    double f = std::pow(config.rope_theta, -2.0 * double(i) / config.head_dim);
    if (scaling.kind == RopeScaling::Kind::linear) f /= scaling.factor;
    if (scaling.kind == RopeScaling::Kind::llama3) {
      // Frequencies that turn more than high_freq_factor times in the original context stay. Frequencies below
      // low_freq_factor turns are divided by `factor`. Between them, both are blended.
      const double turns = scaling.original_max_position * f / (2 * M_PI);
      const double kept = std::clamp(
          (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
      f = kept * f + (1 - kept) * f / scaling.factor;
    }
    freqs[i] = f;
  }
  return freqs;
}

size_t Weights::bytes() const {
  size_t total = embedding.size() + lm_head.bytes() + head.join.bytes(),
         floats = final_norm.size() + 3 * head.norm.size();
  for (const LayerWeights& l : layers) {
    for (auto matrix : LayerWeights::kMatrices) total += (l.*matrix).bytes();
    for (auto vector : LayerWeights::kVectors) floats += (l.*vector).size();
    total += l.router.bytes();
    for (const ExpertWeights& e : l.experts) total += e.gate_up.bytes() + e.down.bytes();
  }
  return total + floats * sizeof(float);
}

Result<std::shared_ptr<const Weights>> load_weights(const std::string& dir, const ModelConfig& config,
                                                    const LoadOptions& options, ThreadTeam& team) {
  if (options.dtype != Dtype::f32 && options.dtype != Dtype::bf16) return invalid("dtype: expected f32 or bf16");
  if (options.weight_group < 0) return invalid("weight_group: expected 0 or more");
  const Dtype matrices = matrix_dtype(config, options);
  const Range layers = options.layers.end > 0 ? options.layers : Range{0, config.n_layers};
  const bool folder_codes = !options.dummy && config.quantization.method != Quantization::Method::none;
  if (Status status = check_memory(config, options.dtype, matrices, options.weight_group, layers); !status)
    return status.error();
  std::optional<Checkpoint> checkpoint;
  if (!options.dummy) {
    Result<Checkpoint> opened = Checkpoint::open(dir);
    if (!opened) return opened.error();
    checkpoint = std::move(opened).value();
  }
  ReadErrors errors;
  WeightLoader loader(checkpoint ? &*checkpoint : nullptr, config, options, matrices, folder_codes, errors, team);
  std::shared_ptr<Weights> weights = build(config, options.dtype, loader, layers);
  if (!errors.first()) return errors.first().error();
  if (checkpoint)
    if (Status status = check_unused(*checkpoint, config, layers, loader.used()); !status) return status.error();
  return std::shared_ptr<const Weights>(std::move(weights));
}

}  // namespace xpyd::model
