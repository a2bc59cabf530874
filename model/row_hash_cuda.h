// base/row_hash.h on CUDA.
#pragma once

#include "base/cuda.h"

namespace xpyd {

// out[r] = row_hash(logits + r * vocab, vocab) for every row. `logits` [n_rows, vocab] and `out`
// [n_rows] are device memory. Enqueues only, and may be captured.
void hash_rows(const float* logits, int n_rows, int vocab, uint64_t* out, cuda::Stream& stream);

}  // namespace xpyd
