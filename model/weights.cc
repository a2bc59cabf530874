// Checkpoint -> Weights, in two passes: the first finds every tensor and checks dtype and shape
// against the configuration; the second allocates, and streams rows into the packed matrices, so
// that beside the packed bytes only a few rows are in memory.
#include "model/weights.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <string>

#include "base/random.h"
#include "model/safetensors.h"

namespace xpyd::model {
namespace {

struct TensorSpec {
  std::string name;
  int rows, cols;  // a vector has one row
  bool matrix;
};

std::string layer_prefix(int layer) { return "model.layers." + std::to_string(layer) + "."; }

// The first failure of readers that run on several threads.
struct ReadErrors {
  std::mutex mutex;
  Status first = ok();
  void keep(const Status& status) {
    std::lock_guard lock(mutex);
    if (first) first = status;
  }
};

using Readers = std::map<std::string, RowReader, std::less<>>;

Result<Readers> checkpoint_readers(const Checkpoint& checkpoint, const ModelConfig& config,
                                   const std::vector<TensorSpec>& specs, ReadErrors& errors) {
  Readers readers;
  for (const TensorSpec& spec : specs) {
    std::vector<int64_t> shape = {spec.cols};
    if (spec.matrix) shape = {spec.rows, spec.cols};
    Result<TensorHandle> found = checkpoint.find(spec.name, shape);
    if (!found) return found.error();
    readers[spec.name] = [tensor = found.value(), cols = spec.cols, &errors](int row, float* out) {
      Status status = tensor.read(int64_t(row) * cols, cols, out);
      if (!status) {
        std::fill(out, out + cols, 0.0f);
        errors.keep(status);
      }
    };
  }
  // A tensor that no line above reads would change the model's meaning: a bias, an adapter.
  for (std::string_view name : checkpoint.names()) {
    if (readers.count(name) || (name == "lm_head.weight" && config.tied_embeddings)) continue;
    if (name.ends_with(".rotary_emb.inv_freq")) continue;  // old files; follows from config.json
    return checkpoint.unexpected(name, config.family);
  }
  return readers;
}

// Seeded random rows for speed runs: matrices uniform with variance 1 / columns, so that
// activations keep their size through the layers; norms about 1, biases about 0. A row depends on
// the seed, the tensor's name and the row, not on the thread that makes it.
Readers dummy_readers(const std::vector<TensorSpec>& specs, uint64_t seed) {
  Readers readers;
  for (const TensorSpec& spec : specs) {
    uint64_t name_hash = 0xcbf29ce484222325u;  // FNV-1a
    for (char c : spec.name) name_hash = (name_hash ^ uint64_t(c)) * 0x100000001b3u;
    const bool norm = !spec.matrix && spec.name.ends_with("weight");
    const float centre = norm ? 1 : 0;
    const float half_width = spec.matrix ? std::sqrt(3.0f / float(spec.cols)) : 0.1f;
    readers[spec.name] = [=, cols = spec.cols](int row, float* out) {
      Random random(Random(seed ^ name_hash ^ (uint64_t(row) << 32)).next());
      const float scale = half_width * 0x1p-31f;
      for (int i = 0; i < cols; i += 2) {
        const uint64_t bits = random.next();
        out[i] = centre + scale * float(int32_t(bits));
        if (i + 1 < cols) out[i + 1] = centre + scale * float(int32_t(bits >> 32));
      }
    };
  }
  return readers;
}

// What build() asks for, tensor by tensor. Without readers it is only listed, and nothing is made.
class WeightLoader {
 public:
  WeightLoader(Readers readers, Dtype dtype, ThreadTeam& team)
      : readers_(std::move(readers)), dtype_(dtype), team_(team) {}
  bool lists() const { return readers_.empty(); }
  const std::vector<TensorSpec>& listed() const { return listed_; }

  struct Part {
    std::string name;
    int rows;
  };
  // The parts' rows one under another.
  PackedMatrix matrix(const std::vector<Part>& parts, int cols, int k_groups) {
    int rows = 0;
    std::vector<std::pair<int, const RowReader*>> starts;
    for (const Part& part : parts) {
      starts.emplace_back(rows, reader({part.name + ".weight", part.rows, cols, true}));
      rows += part.rows;
    }
    if (readers_.empty()) return {};
    auto read = [&starts](int row, float* out) {
      auto part = std::prev(
          std::upper_bound(starts.begin(), starts.end(), row, [](int r, const auto& s) { return r < s.first; }));
      (*part->second)(row - part->first, out);
    };
    return pack_matrix(rows, cols, k_groups, dtype_, read, team_);
  }
  std::vector<float> vector(const std::vector<Part>& parts) {
    std::vector<float> values;
    for (const Part& part : parts) {
      const RowReader* read = reader({part.name, 1, part.rows, false});
      if (!read) continue;
      values.resize(values.size() + size_t(part.rows));
      (*read)(0, values.data() + values.size() - size_t(part.rows));
    }
    return values;
  }
  Buffer table(const std::string& name, int rows, int cols) {
    const RowReader* read = reader({name, rows, cols, true});
    if (!read) return {};
    Buffer table(size_t(rows) * size_t(cols) * dtype_bytes(dtype_));
    team_.run([&](int rank) {
      std::vector<float> values(static_cast<size_t>(cols));
      Range mine = share(rows, rank, team_.size());
      for (int row = mine.begin; row < mine.end; ++row) {
        const size_t first = size_t(row) * size_t(cols);
        (*read)(row, dtype_ == Dtype::f32 ? table.as<float>() + first : values.data());
        if (dtype_ == Dtype::bf16) std::transform(values.begin(), values.end(), table.as<bf16>() + first, to_bf16);
      }
    });
    return table;
  }

 private:
  const RowReader* reader(TensorSpec spec) {
    if (!readers_.empty()) return &readers_.find(spec.name)->second;
    listed_.push_back(std::move(spec));
    return nullptr;
  }

  const Readers readers_;
  const Dtype dtype_;
  ThreadTeam& team_;
  std::vector<TensorSpec> listed_;
};

// Every tensor that a checkpoint of this configuration has, by the names of Hugging Face; loaded, what `of` needs.
std::shared_ptr<Weights> build(const ModelConfig& c, Dtype dtype, WeightLoader& loader, Range of) {
  const auto wanted = [&](int layer) { return loader.lists() || (of.begin <= layer && layer < of.end); };
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
    const std::string attention = layer_prefix(i) + "self_attn.", mlp = layer_prefix(i) + "mlp.";
    layer.qkv = loader.matrix({{attention + "q_proj", q}, {attention + "k_proj", kv}, {attention + "v_proj", kv}},
                              c.hidden, 1);
    layer.o = loader.matrix({{attention + "o_proj", c.hidden}}, q, kRowParallelGroups);
    layer.gate_up = loader.matrix({{mlp + "gate_proj", c.intermediate}, {mlp + "up_proj", c.intermediate}}, c.hidden,
                                  1);
    layer.down = loader.matrix({{mlp + "down_proj", c.hidden}}, c.intermediate, kRowParallelGroups);
    layer.attention_norm = loader.vector({{layer_prefix(i) + "input_layernorm.weight", c.hidden}});
    layer.mlp_norm = loader.vector({{layer_prefix(i) + "post_attention_layernorm.weight", c.hidden}});
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
  weights->final_norm = loader.vector({{"model.norm.weight", c.hidden}});
  weights->lm_head = loader.matrix({{c.tied_embeddings ? "model.embed_tokens" : "lm_head", c.vocab}}, c.hidden, 1);
  return weights;
}

// A configuration that cannot fit is an error of the input, found before memory is asked for.
Status check_memory(const ModelConfig& c, Dtype dtype, Range layers) {
  const double tables = double(c.vocab) * c.hidden * ((layers.begin == 0) + (layers.end == c.n_layers));
  const double matrices = double(c.parameters()) - double(c.vocab) * c.hidden * (c.tied_embeddings ? 1 : 2);
  const double needed = (matrices * (layers.end - layers.begin) / c.n_layers + tables) * double(dtype_bytes(dtype));
  const double machine = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
  if (needed < machine) return ok();
  return invalid("model " + c.name + ": the weights need " + std::to_string(long(needed / 1e6)) + " MB in " +
                 dtype_name(dtype) + ", but this machine has " + std::to_string(long(machine / 1e6)) + " MB of memory");
}

}  // namespace

std::vector<double> rope_frequencies(const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  std::vector<double> freqs(size_t(config.head_dim / 2));
  for (size_t i = 0; i < freqs.size(); ++i) {
    double f = std::pow(config.rope_theta, -2.0 * double(i) / config.head_dim);
    if (scaling.kind == RopeScaling::Kind::linear) f /= scaling.factor;
    if (scaling.kind == RopeScaling::Kind::llama3) {
      // Turns that complete more than high_freq_factor times in the original context are kept,
      // those below low_freq_factor are slowed by `factor`, and between them both are blended.
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
  size_t total = embedding.size() + lm_head.bytes(), floats = final_norm.size();
  for (const LayerWeights& l : layers) {
    for (auto matrix : LayerWeights::kMatrices) total += (l.*matrix).bytes();
    for (auto vector : LayerWeights::kVectors) floats += (l.*vector).size();
  }
  return total + floats * sizeof(float);
}

Result<std::shared_ptr<const Weights>> load_weights(const std::string& dir, const ModelConfig& config,
                                                    const LoadOptions& options, ThreadTeam& team) {
  if (options.dtype != Dtype::f32 && options.dtype != Dtype::bf16) return invalid("dtype: expected f32 or bf16");
  const Range layers = options.layers.end > 0 ? options.layers : Range{0, config.n_layers};
  WeightLoader names({}, options.dtype, team);
  build(config, options.dtype, names, layers);
  auto load = [&](Readers readers) {
    WeightLoader loader(std::move(readers), options.dtype, team);
    return build(config, options.dtype, loader, layers);
  };
  if (options.dummy) {
    if (Status status = check_memory(config, options.dtype, layers); !status) return status.error();
    return std::shared_ptr<const Weights>(load(dummy_readers(names.listed(), options.seed)));
  }
  Result<Checkpoint> checkpoint = Checkpoint::open(dir);
  if (!checkpoint) return checkpoint.error();
  ReadErrors errors;
  Result<Readers> readers = checkpoint_readers(checkpoint.value(), config, names.listed(), errors);
  if (!readers) return readers.error();
  if (Status status = check_memory(config, options.dtype, layers); !status) return status.error();
  std::shared_ptr<Weights> weights = load(std::move(readers).value());
  if (!errors.first) return errors.first.error();
  if (Status status = checkpoint.value().check_unchanged(); !status) return status.error();
  return std::shared_ptr<const Weights>(std::move(weights));
}

}  // namespace xpyd::model
