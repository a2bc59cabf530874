// The table of CUDA attention, the requirements of all its rows, and the merge of splits.
#include "attention/cuda/attention_cuda_kernel.h"

namespace xpyd::attention {
namespace cuda_kernels {
namespace {

constexpr int kAtOnce = 8;  // splits that are loaded together

// One thread block per (head, sequence): thread d merges element d over the splits in ascending order.
__global__ void merge_kernel(const __grid_constant__ CudaAttentionArgs args) {
  int head = int(blockIdx.x), seq = int(blockIdx.y), dim = args.layout.shape.head_dim;
  int q_token = args.step.q_offsets[seq];
  if (args.step.q_offsets[seq + 1] == q_token) return;
  Tokens seen = visible(args.step.kv_lengths[seq] - 1, args.sliding_window);
  int first = seen.begin / kSplitTokens, last = (seen.end - 1) / kSplitTokens;
  if (first == last) return;
  int listed = args.step.split_begins[seq];
  const float* part = partial(args, listed + first - args.step.splits[listed].split, head);
  size_t distance = size_t(args.n_heads) * partial_floats(dim), state = partial_floats(dim) - 4;
  for (int d = int(threadIdx.x); d < dim; d += int(blockDim.x)) {
    float max = kNone, sum = 0, acc = 0;
    for (int split = first; split <= last; split += kAtOnce) {
      float accs[kAtOnce] = {}, maxima[kAtOnce] = {}, sums[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // all loads are issued before the first value is needed
        if (split + i > last) continue;
        const float* next = part + size_t(split + i - first) * distance;
        accs[i] = next[d], maxima[i] = next[state], sums[i] = next[state + 1];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (split + i > last) continue;
        float new_max = fmaxf(max, maxima[i]);
        float a = exp2f(max - new_max), b = exp2f(maxima[i] - new_max);
        acc = acc * a + accs[i] * b;
        sum = sum * a + sums[i] * b;
        max = new_max;
      }
    }
    size_t row = size_t(q_token) * size_t(args.n_heads) + size_t(head);
    put(args.out, args.dtype, row * size_t(dim) + size_t(d), acc / sum);
  }
}

}  // namespace

void merge_splits(const CudaAttentionArgs& args, Stream& stream) {
  if (args.step.max_kv_length <= kSplitTokens) return;
  Shape shape = {.grid = dim3(unsigned(args.n_heads), unsigned(args.step.n_seqs)), .block = 128};
  launch(merge_kernel, "merge_splits", shape, stream, args);
}

void check(const CudaAttentionArgs& args) {
  const KvShape& shape = args.layout.shape;
  for (Dtype dtype : {args.dtype, shape.dtype}) XPYD_CHECK(dtype == Dtype::f32 || dtype == Dtype::bf16);
  XPYD_CHECK(args.n_heads > 0 && args.n_heads % shape.n_kv_heads == 0);
  XPYD_CHECK(bytes_of_rows(args.layout) / shape.row_bytes() < uint32_t(-1), "KvRows counts 32 bits");
  XPYD_CHECK(args.layer >= 0 && args.layer < shape.n_layers && args.sliding_window >= 0);
}

}  // namespace cuda_kernels

size_t cuda_attention_workspace(int n_splits, int n_heads, int head_dim) {
  return size_t(n_splits) * size_t(n_heads) * cuda_kernels::partial_floats(head_dim);
}

std::span<const CudaAttentionVariant> cuda_attention_variants() {
  using enum CudaAttentionVariant::Phase;
  using namespace cuda_kernels;
  static constexpr CudaAttentionVariant kVariants[] = {
      {"naive", prefill, naive, naive_refuses},
      {"flash_mma", prefill, flash_mma, mma_refuses},
      {"flash_wgmma", prefill, flash_wgmma, wgmma_refuses},
      {"naive", decode, naive, naive_refuses},
      {"split_kv", decode, split_kv, split_kv_refuses},
      {"split_mma", decode, split_mma, mma_refuses},
  };
  return kVariants;
}

const CudaAttentionVariant& default_cuda_attention(CudaAttentionVariant::Phase phase, const CudaAttentionArgs& args,
                                                   const cuda::Card& card) {
  const CudaAttentionVariant* best = nullptr;
  for (const CudaAttentionVariant& variant : cuda_attention_variants())
    if (variant.phase == phase && !variant.refuses(args, card) && !(best && args.layout.shape.dtype == Dtype::f32))
      best = &variant;
  XPYD_CHECK(best, "naive takes everything that a model may have");
  return *best;
}

}  // namespace xpyd::attention
