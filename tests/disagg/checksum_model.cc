#include "tests/disagg/checksum_model.h"

#include <algorithm>
#include <cstring>

namespace xpyd::testing {
namespace {

constexpr uint64_t kStart = 0x243f6a8885a308d3u;

uint64_t fold(uint64_t h, uint64_t x) {
  h = (h ^ x) * 0x9e3779b97f4a7c15u;
  return h ^ (h >> 29);
}

// The value that a token leaves in one plane (layer, K or V). `prefix` chains the tokens up to it.
uint64_t row_of(uint64_t prefix, int plane) { return fold(prefix, uint64_t(plane) + 77); }

int32_t token_of(uint64_t all) { return int32_t(all % uint64_t(checksum_config().vocab)); }

class ChecksumModel final : public SynchronousModel {
 public:
  const ModelConfig& config() const override { return checksum_config(); }

  // A token's row is the chain over all tokens up to it, and the plane's checksum of that chain. So it follows from the
  // row before it, wherever that row came from.
  void forward(const StepInput& step, float* logits) override {
    const int planes = 2 * config().n_layers;
    for (int layer = 0; layer < config().n_layers; ++layer) {
      for (size_t s = 0; s < step.views.size(); ++s) {
        const KvView& view = step.views[s];
        const int begin = step.q_offsets[s], end = step.q_offsets[s + 1];
        for (int i = begin; i < end; ++i) {
          const int position = step.kv_lengths[s] - (end - i);
          for (int kv = 0; kv < 2; ++kv) {
            uint64_t before[2] = {kStart, 0};
            if (position > 0) std::memcpy(before, view.row(layer, kv, position - 1, 0), sizeof before);
            const uint64_t prefix = fold(before[0], uint64_t(uint32_t(step.token_ids[size_t(i)])));
            const uint64_t row[2] = {prefix, row_of(prefix, 2 * layer + kv)};
            std::memcpy(view.row(layer, kv, position, 0), row, sizeof row);
          }
        }
      }
      if (step.observer) step.observer->layer_done(layer);
    }
    size_t s = 0;
    for (int32_t row : step.logit_rows) {
      while (row >= step.q_offsets[s + 1]) ++s;
      const int length = step.kv_lengths[s] - (step.q_offsets[s + 1] - row) + 1;
      uint64_t all = 0;
      for (int t = 0; t < length; ++t)
        for (int plane = 0; plane < planes; ++plane) {
          uint64_t sums[2];
          std::memcpy(sums, step.views[s].row(plane / 2, plane % 2, t, 0), sizeof sums);
          all = fold(all, sums[1]);
        }
      std::fill_n(logits, config().vocab, 0.0f);
      logits[token_of(all)] = 1;
      logits += config().vocab;
    }
  }
  Work work(const StepInput&) const override { return {}; }
};

}  // namespace

const ModelConfig& checksum_config() {
  static const ModelConfig config = [] {
    Result<ModelConfig> parsed = parse_model_config(R"({
      "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
      "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1,
      "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 251, "max_position_embeddings": 512,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false
    })",
                                                    "checksum/config.json");
    return parsed.value();
  }();
  return config;
}

std::unique_ptr<Model> make_checksum_model() { return std::make_unique<ChecksumModel>(); }

std::vector<int32_t> checksum_tokens(const std::vector<int32_t>& prompt, int n) {
  const int planes = 2 * checksum_config().n_layers;
  std::vector<int32_t> output;
  uint64_t prefix = kStart, all = 0;
  auto add = [&](int32_t token) {
    prefix = fold(prefix, uint64_t(uint32_t(token)));
    for (int plane = 0; plane < planes; ++plane) all = fold(all, row_of(prefix, plane));
  };
  for (int32_t token : prompt) add(token);
  for (int i = 0; i < n; ++i) {
    output.push_back(token_of(all));
    add(output.back());
  }
  return output;
}

}  // namespace xpyd::testing
