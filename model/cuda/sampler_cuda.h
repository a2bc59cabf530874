// Logits -> one token on CUDA, for rows without penalties and logprobs; model/sampler.h says what
// each step means. Weights are whole multiples of 2^-40 of the most likely token's, so that their
// sums are exact and a token depends on its row and its draw alone.
#pragma once

#include "base/cuda/cuda.h"
#include "model/sampler.h"

namespace xpyd::model {

struct CudaSampleArgs {
  const float* logits = nullptr;            // [n, vocab], device
  const Draw* rows = nullptr;               // [n], device; null: all greedy
  bool any_top_k = true, any_top_p = true;  // false: no row asks for it, and its rounds are spared
  int n_slices = 0;                         // blocks of a row, at most 16; 0: by what fills a card. No bit changes.
  void* workspace = nullptr;                // cuda_sample_workspace(n) bytes, device; 0 at first, left as found
  int32_t* tokens = nullptr;                // [n], device
  int32_t* nans = nullptr;                  // [n], device: NaN among the logits, each read as -infinity
  int n = 0, vocab = 0;
};

size_t cuda_sample_workspace(int max_n);

// Total, like sample(): +infinity is the largest float; 0 where nothing is above -infinity.
void cuda_sample(const CudaSampleArgs& args, const cuda::On& on);

// base/row_hash.h on CUDA: out[r] = row_hash(logits + r * vocab, vocab) for every row. `logits` [n_rows, vocab] and
// `out` [n_rows] are device memory. Enqueues only, and may be captured.
void hash_rows(const float* logits, int n_rows, int vocab, uint64_t* out, cuda::Stream& stream);

}  // namespace xpyd::model
