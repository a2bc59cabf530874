// Attention on CUDA: the contract of attention.h over device memory. append is fused with RoPE (model/cuda/ops_cuda.h).
// A step's tables are uploaded once, as a CudaStep, and every layer reads them.
//
// For one variant and one card, the bits of out[i, h] depend on q[i, h] and the visible rows alone, as on the CPU.
// Tiles and splits are cut from position 0 of the sequence and merged in a fixed order.
//
// Thread safety: one thread per stream. Calls only enqueue; what `args` points to must not change until the work is
// done.
#pragma once

#include <span>

#include "allocator/kv/kv_layout.h"
#include "base/cuda/cuda.h"

namespace xpyd::attention {

// Tokens of KV in a split. A thread block of a decode kernel takes one split of one KV head; splits are cut from
// position 0.
constexpr int kCudaSplitTokens = 512;
struct CudaSplit {
  int32_t seq, split;  // seq -1: no work (padding of a captured step)
};
// The range of splits that the last token of a sequence sees.
struct CudaSplitRange {
  int begin, end;
};
constexpr CudaSplitRange cuda_splits(int kv_length, int sliding_window) {
  const int seen = sliding_window > 0 && kv_length > sliding_window ? kv_length - sliding_window : 0;
  return {seen / kCudaSplitTokens, (kv_length + kCudaSplitTokens - 1) / kCudaSplitTokens};
}

// One step as kernels see it; all pointers are to device memory. Token i is query token i - q_offsets[s] of its
// sequence s, at position kv_lengths[s] - (q_offsets[s + 1] - q_offsets[s]) + (i - q_offsets[s]).
struct CudaStep {
  const int32_t* q_offsets = nullptr;   // [n_seqs + 1]
  const int32_t* kv_lengths = nullptr;  // [n_seqs], this step's tokens included
  const int32_t* token_seqs = nullptr;  // [n_tokens]: the sequence of each token
  const int32_t* positions = nullptr;   // [n_tokens]
  // Block tables of all sequences, concatenated. In contiguous memory each has one entry, the slot.
  const int32_t* block_tables = nullptr;
  const int32_t* table_begins = nullptr;  // [n_seqs]: index of each sequence's first entry
  // The work of decode kernels by ascending sequence and split: at least the splits that each query sees.
  const CudaSplit* splits = nullptr;      // [n_splits]
  const int32_t* split_begins = nullptr;  // [n_seqs]: index of each sequence's first split
  int n_splits = 0;                       // padding included
  bool contiguous = false;                // one block holds the whole sequence
  int n_seqs = 0, n_tokens = 0;
  int max_q_tokens = 0;   // no sequence has more; a captured graph keeps an upper bound
  int max_kv_length = 0;  // likewise
};

// Sequences without query tokens in this step are skipped (padding of a captured batch).
struct CudaAttentionArgs {
  const void* q = nullptr;   // [n_tokens, n_heads, head_dim], `dtype`, contiguous, after RoPE
  void* out = nullptr;       // [n_tokens, n_heads, head_dim], `dtype`, contiguous
  Dtype dtype = Dtype::f32;  // of q and out: f32 or bf16; sums are f32
  std::byte* pool = nullptr;
  KvLayout layout;  // layout.shape.dtype: f32 or bf16
  CudaStep step;
  int layer = 0;
  int n_heads = 0;
  int sliding_window = 0;  // tokens; 0 = none
  float scale = 0;
  float* workspace = nullptr;  // [cuda_attention_workspace() floats]: partial results of splits
};

// The floats of workspace that any variant needs for steps of at most `n_splits` splits.
size_t cuda_attention_workspace(int n_splits, int n_heads, int head_dim);

// One kernel. A `prefill` row takes steps with any number of query tokens per sequence, a `decode` row steps with at
// most one.
struct CudaAttentionVariant {
  const char* name;
  enum Phase { prefill, decode } phase;
  void (*run)(const CudaAttentionArgs& args, cuda::Stream& stream);
  // Null if it can run these arguments on this card; else the reason ("needs bf16 KV", "needs sm_90").
  const char* (*refuses)(const CudaAttentionArgs& args, const cuda::Card& card);
};
std::span<const CudaAttentionVariant> cuda_attention_variants();
// The last row of that phase that takes these arguments, which is the fastest (experiments/results/). For f32 KV it is
// `naive`, which serves both phases, so that logits keep their bits however a prompt is chunked.
const CudaAttentionVariant& default_cuda_attention(CudaAttentionVariant::Phase phase, const CudaAttentionArgs& args,
                                                   const cuda::Card& card);

}  // namespace xpyd::attention
