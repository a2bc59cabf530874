// Shared by the tests of the model: a model of a folder, and sequences with contiguous KV.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/thread_team.h"
#include "model/config.h"
#include "model/model.h"
#include "model/weights/safetensors.h"
#include "tests/catch.h"

namespace xpyd::testing {

struct LoadedModel {
  LoadedModel(const std::string& dir, LoadOptions options = {}, int n_threads = 1, int max_step_tokens = 64)
      : team(n_threads) {
    Result<ModelConfig> read = load_model_config(dir);
    INFO((read ? "" : read.error().message));
    REQUIRE(read.ok());
    config = read.value();
    auto loaded = load_weights(dir, config, options, team);
    INFO((loaded ? "" : loaded.error().message));
    REQUIRE(loaded.ok());
    weights = loaded.value();
    model = make_llama(weights, team, max_step_tokens, max_step_tokens);
  }
  ThreadTeam team;
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
  std::unique_ptr<Model> model;
};

// KV of up to `n_slots` sequences of `max_tokens` tokens, one contiguous slot each.
struct ContiguousKv {
  ContiguousKv(const Model& model, int max_tokens, int n_slots = 1, KvOrder order = KvOrder::layer_major)
      : layout{kv_shape(model.config(), Dtype::f32), order, max_tokens, n_slots}, pool(layout.pool_bytes()) {
    for (size_t i = 0; i < pool.size() / 4; ++i)
      pool.as<uint32_t>()[i] = 0x7fc00000;  // NaN reveals a row that is read before it is written
  }
  KvView view(int slot = 0) const { return {pool.data(), &layout, nullptr, slot}; }
  KvLayout layout;
  Buffer pool;
};

// Runs one forward over some sequences: `tokens[s]` follow the `past[s]` tokens that are in the KV. Returns the logits
// of every token, [n_tokens, vocab].
inline std::vector<float> run_step(Model& model, const std::vector<KvView>& views,
                                   const std::vector<std::vector<int32_t>>& tokens, const std::vector<int>& past) {
  std::vector<int32_t> ids, offsets = {0}, lengths;
  for (size_t s = 0; s < tokens.size(); ++s) {
    ids.insert(ids.end(), tokens[s].begin(), tokens[s].end());
    offsets.push_back(int32_t(ids.size()));
    lengths.push_back(past[s] + int32_t(tokens[s].size()));
  }
  std::vector<int32_t> rows(ids.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<float> logits(ids.size() * size_t(model.config().vocab));
  compute_step(model, {ids, offsets, lengths, views, rows}, logits.data());
  return logits;
}

// Returns the logits of all tokens of one prompt, computed in steps of `chunk` tokens.
template <class Kv>
std::vector<float> prompt_logits(Model& model, const Kv& kv, const std::vector<int32_t>& prompt, int chunk) {
  std::vector<float> all;
  for (int at = 0; at < int(prompt.size()); at += chunk) {
    const int end = std::min(at + chunk, int(prompt.size()));
    auto part = run_step(model, {kv.view()}, {{prompt.begin() + at, prompt.begin() + end}}, {at});
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}
inline std::vector<float> run_prompt(Model& model, const std::vector<int32_t>& prompt, int chunk) {
  return prompt_logits(model, ContiguousKv(model, int(prompt.size())), prompt, chunk);
}

}  // namespace xpyd::testing
