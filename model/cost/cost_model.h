// What a step costs by arithmetic alone: FLOPs and compulsory bytes of prefill and decode in closed
// form, seconds at given rates, and when fetching KV beats computing it again. The same figures as
// Model::work() of a step with these lengths, for any length and without a model.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/work.h"
#include "model/config.h"

namespace xpyd::model {

struct CostModel {
  ModelConfig config;
  Dtype weights = Dtype::bf16;
  Dtype activations = Dtype::bf16;
  Dtype kv = Dtype::bf16;

  double kv_token_bytes() const;  // all layers, K and V

  // One sequence: `tokens` new ones after `cached` whose KV is there. Logits of the last token when
  // `logits`, else of none (a chunk that is not the last, or a prefix computed again for its KV).
  Work prefill(int64_t tokens, int64_t cached, bool logits = true) const;

  // One token of each of `batch` sequences that hold `context` tokens with it.
  Work decode(int64_t batch, int64_t context) const;

  // Bytes/s above which fetching the KV of `prefix` tokens takes less time than computing it at `flops_per_s`.
  double break_even_bytes_per_s(int64_t prefix, double flops_per_s) const;

 private:
  Work step(int64_t batch, int64_t tokens, int64_t cached, int64_t n_logits) const;
};

// What a machine does, measured or published.
struct Rates {
  double flops_per_s = 0;
  double bytes_per_s = 0;
};
double seconds(const Work& work, const Rates& rates);  // the slower of both bounds

}  // namespace xpyd::model
