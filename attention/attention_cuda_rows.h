// The rows of cuda_attention_variants(), as their files define them.
#pragma once

#include "attention/attention_cuda.h"

namespace xpyd::cuda::attention {

void check(const CudaAttentionArgs& args);  // what every launcher requires

void naive(const CudaAttentionArgs& args, Stream& stream);
const char* naive_refuses(const CudaAttentionArgs& args, const Card& card);

void split_kv(const CudaAttentionArgs& args, Stream& stream);
const char* split_kv_refuses(const CudaAttentionArgs& args, const Card& card);

void split_mma(const CudaAttentionArgs& args, Stream& stream);
void flash_mma(const CudaAttentionArgs& args, Stream& stream);
const char* mma_refuses(const CudaAttentionArgs& args, const Card& card);

void flash_wgmma(const CudaAttentionArgs& args, Stream& stream);
const char* wgmma_refuses(const CudaAttentionArgs& args, const Card& card);

}  // namespace xpyd::cuda::attention
