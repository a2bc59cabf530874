// Logits -> one token on CUDA, for choices that a Draw holds (model/sampler.h): greedy, or from all tokens at a
// temperature. Weights are whole multiples of 2^-40 of the most likely token's weight. So sums are exact, and a token
// depends on its row and its draw only. A greedy token is sample()'s. At a temperature, a draw at the border of two
// tokens may choose the other one than sample() does.
#pragma once

#include "base/cuda/cuda.h"
#include "model/sampler.h"

namespace xpyd::model {

struct CudaSampleArgs {
  const float* logits = nullptr;  // [n, vocab], device
  const Draw* rows = nullptr;     // [n], device; null: all greedy
  int n_slices = 0;               // blocks per row, at most 16; 0: enough to fill a card; changes no bit
  void* workspace = nullptr;      // cuda_sample_workspace(n) bytes, device; zero before the first call
  int32_t* tokens = nullptr;      // [n], device
  int32_t* nans = nullptr;        // [n], device: number of NaN logits, each read as -infinity
  int n = 0, vocab = 0;
};

// Bytes of workspace for up to max_n rows.
size_t cuda_sample_workspace(int max_n);

// Enqueues the choice of one token per row. It takes any logits, as sample() does: +infinity is the largest float, and
// the token is 0 if no logit is above -infinity.
void cuda_sample(const CudaSampleArgs& args, cuda::Stream& stream);

// base/row_hash.h on CUDA: out[r] = row_hash(logits + r * vocab, vocab). `logits` [n_rows, vocab] and `out` [n_rows]
// are device memory. It only enqueues and may be captured.
void hash_rows(const float* logits, int n_rows, int vocab, uint64_t* out, cuda::Stream& stream);

}  // namespace xpyd::model
