// Attention on CUDA: the contract of attention.h over device memory (append is fused with RoPE:
// model/cuda/ops_cuda.h). A step's tables are uploaded once (CudaStep) and read by every layer.
//
// As on the CPU, the bits of out[i, h] depend on q[i, h] and the visible rows alone, for one variant and one card:
// tiles and splits are fixed from position 0 of the sequence, merged in a fixed order.
#pragma once

#include <span>

#include "allocator/kv/kv_layout.h"
#include "base/cuda/cuda.h"

namespace xpyd::attention {

// Of KV, that a block of a decode kernel takes of one KV head: splits are cut from position 0 of the sequence.
constexpr int kCudaSplitTokens = 512;
struct CudaSplit {
  int32_t seq, split;  // seq -1: nothing (padding of a captured step)
};
// The splits of which a sequence's last token sees something.
struct CudaSplitRange {
  int begin, end;
};
constexpr CudaSplitRange cuda_splits(int kv_length, int sliding_window) {
  const int seen = sliding_window > 0 && kv_length > sliding_window ? kv_length - sliding_window : 0;
  return {seen / kCudaSplitTokens, (kv_length + kCudaSplitTokens - 1) / kCudaSplitTokens};
}

// One step as kernels see it. All pointers: device memory. Token i is query token i - q_offsets[s] of its sequence s
// and stands at position kv_lengths[s] - (q_offsets[s + 1] - q_offsets[s]) + that.
struct CudaStep {
  const int32_t* q_offsets = nullptr;   // [n_seqs + 1]
  const int32_t* kv_lengths = nullptr;  // [n_seqs], this step's tokens included
  const int32_t* token_seqs = nullptr;  // [n_tokens]: the sequence of each token
  const int32_t* positions = nullptr;   // [n_tokens]
  // One table behind another; contiguous: of one entry, the slot.
  const int32_t* block_tables = nullptr;
  const int32_t* table_begins = nullptr;  // [n_seqs]: where the table of a sequence begins
  // What decode rows compute, by ascending sequence and split: at least what each query sees.
  const CudaSplit* splits = nullptr;      // [n_splits]
  const int32_t* split_begins = nullptr;  // [n_seqs]: where those of a sequence begin
  int n_splits = 0;                       // padding included
  bool contiguous = false;                // one block holds the whole sequence
  int n_seqs = 0, n_tokens = 0;
  int max_q_tokens = 0;   // of one sequence: at most this (a captured graph keeps an upper bound)
  int max_kv_length = 0;  // likewise
};

// Sequences with q_offsets[s] == q_offsets[s + 1] are skipped (padding of a captured batch).
struct CudaAttentionArgs {
  const void* q = nullptr;   // [n_tokens, n_heads, head_dim], `dtype`, contiguous, after RoPE
  void* out = nullptr;       // [n_tokens, n_heads, head_dim], `dtype`, contiguous
  Dtype dtype = Dtype::f32;  // of q and out: f32 or bf16; sums are f32
  std::byte* pool = nullptr;
  KvLayout layout;  // layout.shape.dtype: f32, bf16, int8 or int4
  CudaStep step;
  int layer = 0;
  int n_heads = 0;
  int sliding_window = 0;  // tokens; 0 = none
  float scale = 0;
  float* workspace = nullptr;  // [cuda_attention_workspace() floats]: partial results of splits
};

// Floats that any variant needs for steps of at most this many splits.
size_t cuda_attention_workspace(int n_splits, int n_heads, int head_dim);

// One way to compute attention; `prefill` rows take steps with any number of query tokens per
// sequence, `decode` rows steps with at most one per sequence.
struct CudaAttentionVariant {
  const char* name;
  enum Phase { prefill, decode } phase;
  void (*run)(const CudaAttentionArgs& args, cuda::Stream& stream);
  // Null: it can run these arguments on this card; else why not ("needs bf16 KV", "needs sm_90").
  const char* (*refuses)(const CudaAttentionArgs& args, const cuda::Card& card);
  const char* source;
};
std::span<const CudaAttentionVariant> cuda_attention_variants();
// The last row of that phase that takes these arguments, which is the fastest (experiments/results/). For f32 KV the
// naive row: it serves both phases, so that logits keep their bits however a prompt is cut.
const CudaAttentionVariant& default_cuda_attention(CudaAttentionVariant::Phase phase, const CudaAttentionArgs& args,
                                                   const cuda::Card& card);

}  // namespace xpyd::attention
