// Which rows of cuda_attention_variants() a model runs.
#pragma once

#include <string>

#include "attention/attention_cuda.h"
#include "model/config.h"

namespace xpyd {

// What is the same for all of a model's calls, and all that refuses() looks at.
CudaAttentionArgs attention_args(const ModelConfig& config, Dtype activations, const KvLayout& layout, bool contiguous);

// The row of that name, or the default for "auto". A prefill row may also decode.
Result<const CudaAttentionVariant*> attention_row(CudaAttentionVariant::Phase phase, const std::string& name,
                                                  const CudaAttentionArgs& args, const cuda::Card& card);

}  // namespace xpyd
