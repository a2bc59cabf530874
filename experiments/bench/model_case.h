// Whole steps of the 1-billion-parameter Llama to time, over KV that was filled and not computed, with a check. Used by
// model_bench.cc and the peers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/model.h"

namespace xpyd::experiments {

inline std::shared_ptr<const Weights> llama_1b(const LoadOptions& options, ThreadTeam& team) {
  const std::string dir = "experiments/models/llama-1b";
  auto config = load_model_config(dir);
  XPYD_CHECK(config.ok(), config ? "" : config.error().message);
  auto weights = load_weights(dir, config.value(), options, team);
  XPYD_CHECK(weights.ok(), weights ? "" : weights.error().message);
  return weights.value();
}

class ModelCase {
 public:
  // `batch` sequences of up to `context` tokens each, in steps of up to `step_tokens`. `kv` is f32 or bf16.
  ModelCase(std::shared_ptr<const Weights> weights, ThreadTeam& team, int context, int batch, int step_tokens, Dtype kv,
            const Kernels& kernels = {})
      : model_(make_llama(std::move(weights), team, std::max(step_tokens, batch), batch, kernels)),
        layout_{kv_shape(model_->config(), kv), KvOrder::layer_major, context, batch},
        pool_(layout_.pool_bytes()),
        logits_(size_t(model_->config().vocab) * size_t(batch)) {
    Random random(1);
    auto fill = [&]<class T>(T, auto value) {
      for (size_t i = 0; i < pool_.size() / sizeof(T); ++i) pool_.as<T>()[i] = value(float(random.uniform() * 2 - 1));
    };
    kv == Dtype::f32 ? fill(float{}, [](float x) { return x; }) : fill(bf16{}, to_bf16);
    for (int i = 0; i < context; ++i) tokens_.push_back(int32_t(random.below(uint64_t(model_->config().vocab))));
    for (int i = 0; i < batch; ++i) views_.push_back({pool_.data(), &layout_, nullptr, i});
  }

  // Prepares a step of `batch` sequences with their last `n` tokens each, at a KV length of `length`.
  void set(int batch, int n, int length) {
    offsets_.resize(size_t(batch) + 1);
    for (int s = 0; s <= batch; ++s) offsets_[size_t(s)] = s * n;
    lengths_.assign(size_t(batch), length);
    rows_.clear();
    for (int s = 1; s <= batch; ++s) rows_.push_back(s * n - 1);
  }
  StepInput step(int first_token = 0) const {
    const size_t batch = lengths_.size(), n = size_t(offsets_.back());
    return {.token_ids = std::span(tokens_).subspan(size_t(first_token), n),
            .q_offsets = offsets_,
            .kv_lengths = lengths_,
            .views = std::span(views_).first(batch),
            .logit_rows = rows_};
  }
  void run(int first_token = 0) { compute_step(*model_, step(first_token), logits_.data()); }
  // Computes a prompt with `chunk` tokens per step, and the logits of its last token.
  void prefill(int prompt, int chunk) {
    for (int done = 0; done < prompt; done += chunk) {
      set(1, std::min(chunk, prompt - done), std::min(done + chunk, prompt));
      if (done + chunk < prompt) rows_.clear();
      run(done);
    }
  }
  Work work() const { return model_->work(step()); }
  std::span<const int32_t> tokens() const { return tokens_; }  // of every prompt, [context]
  std::span<const float> logits() const { return logits_; }    // of the last step

  // Checks the logits after 20 tokens. They are numbers, and have the same bits whether the tokens come in one step, or
  // as 12, 7 and 1.
  std::string check() {
    const size_t vocab = size_t(model_->config().vocab);
    set(1, 20, 20);
    run();
    const std::vector<float> whole(logits_.begin(), logits_.begin() + long(vocab));
    for (int done = 0; int n : {12, 7, 1}) {
      set(1, n, done + n);
      run(done);
      done += n;
    }
    if (std::memcmp(whole.data(), logits_.data(), vocab * sizeof(float)) != 0)
      return "the logits differ between a prompt in three steps and in one";
    for (float x : whole)
      if (!std::isfinite(x)) return "a logit is not finite";
    return "";
  }

 private:
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer pool_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_, offsets_, lengths_, rows_;
  std::vector<KvView> views_;
};

}  // namespace xpyd::experiments
