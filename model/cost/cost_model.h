// The cost of a step by arithmetic alone: FLOPs and compulsory bytes of prefill and decode in closed form, seconds at
// given rates, and the bandwidth above which fetching KV beats recomputing it. The figures equal Model::work() of a
// step with these lengths; they need no model and take any length.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/work.h"
#include "model/config.h"

namespace xpyd::model {

// FLOPs and bytes of a model's steps; dtypes of weights, activations and KV are its own.
struct CostModel {
  ModelConfig config;
  Dtype weights = Dtype::bf16;
  Dtype activations = Dtype::bf16;
  Dtype kv = Dtype::bf16;

  double kv_token_bytes() const;  // all layers, K and V

  // One sequence computes `tokens` new tokens after `cached` tokens whose KV exists. `logits`: of the last token, or
  // none (a chunk that is not the last, or a prefix recomputed for its KV).
  Work prefill(int64_t tokens, int64_t cached, bool logits = true) const;

  // One token of each of `batch` sequences; `context` tokens per sequence, the new one included.
  Work decode(int64_t batch, int64_t context) const;

  // Bytes/s above which fetching the KV of `prefix` tokens is faster than computing it at `flops_per_s`.
  double break_even_bytes_per_s(int64_t prefix, double flops_per_s) const;

 private:
  Work step(int64_t batch, int64_t tokens, int64_t cached, int64_t n_logits) const;
};

// Rates of a machine, measured or published.
struct Rates {
  double flops_per_s = 0;
  double bytes_per_s = 0;
};
double seconds(const Work& work, const Rates& rates);  // the slower of both bounds

}  // namespace xpyd::model
