// A model that computes nothing, for benchmarks and tests of everything around a model.
#pragma once

#include <algorithm>
#include <memory>

#include "base/random.h"
#include "model/model.h"

namespace xpyd::experiments {

// A Model with the shape of `config` that neither writes nor reads KV. The logits of a token are 0 except for one 1,
// whose place depends on the token's id and position alone. So a greedy continuation is deterministic and independent
// of batching, chunking and the cache. The observer is called for every layer. A step allocates nothing.
class NullModel final : public SynchronousModel {
 public:
  explicit NullModel(const ModelConfig& config) : config_(config) {}
  const ModelConfig& config() const override { return config_; }

  void forward(const StepInput& step, float* logits) override {
    if (step.observer)
      for (int layer = 0; layer < config_.n_layers; ++layer) step.observer->layer_done(layer);
    size_t s = 0;
    for (int32_t row : step.logit_rows) {
      while (row >= step.q_offsets[s + 1]) ++s;
      const int position = step.kv_lengths[s] - (step.q_offsets[s + 1] - row);
      const uint64_t key = uint64_t(position) << 32 | uint32_t(step.token_ids[size_t(row)]);
      std::fill_n(logits, config_.vocab, 0.0f);
      logits[Random(key).next() % uint64_t(config_.vocab)] = 1;
      logits += config_.vocab;
    }
  }

  Work work(const StepInput&) const override { return {}; }

 private:
  ModelConfig config_;
};

inline std::unique_ptr<Model> make_null_model(const ModelConfig& config) { return std::make_unique<NullModel>(config); }

}  // namespace xpyd::experiments
