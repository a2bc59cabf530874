// The simplest kernel, for both phases: one warp per (query token, head), online softmax over 32 tokens at a time. A
// lane has one token while scores are computed, and a few dims while values are added. Lesson: each query head reads
// all of K and V for itself, and each lane reads a row of its own, so reads are neither shared nor coalesced.
#include "attention/cuda/attention_cuda_kernel.h"

namespace xpyd::attention::cuda_kernels {
namespace {

constexpr int kWarps = 4;  // of a thread block; they do not share anything
constexpr int kMaxHeadDim = 256;

template <class T>
__global__ void naive_kernel(const __grid_constant__ CudaAttentionArgs args) {
  int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  Carver carver;
  Shared<float> weights = carver.take<float>(kWarps * 32).at(warp * 32, 32);
  int row = int(blockIdx.x) * kWarps + warp, token = row / args.n_heads, head = row % args.n_heads;
  if (token >= args.step.q_offsets[args.step.n_seqs]) return;
  const KvShape& shape = args.layout.shape;
  int dim = shape.head_dim, kv_head = head / (args.n_heads / shape.n_kv_heads);
  KvView view = view_of(args.step, args.pool, args.layout, args.step.token_seqs[token]);
  Tokens seen = visible(args.step.positions[token], args.sliding_window);
  size_t q = size_t(row) * size_t(dim);
  float scale = args.scale * kLog2E;

  float max = kNone, sum = 0, acc[kMaxHeadDim / 32] = {};  // dims lane, lane + 32, ...
  for (int first = seen.begin / 32 * 32; first < seen.end; first += 32) {
    int t = first + lane;
    float score = kNone;
    if (t >= seen.begin && t < seen.end) {
      const T* k = reinterpret_cast<const T*>(view.row(args.layer, 0, t, kv_head));
      float dot = 0;
      for (int d = 0; d < dim; ++d) dot += get(args.q, args.dtype, q + size_t(d)) * to_float(k[d]);
      score = dot * scale;
    }
    float new_max = fmaxf(max, warp_max(score));
    float keep = exp2f(max - new_max), weight = exp2f(score - new_max);
    max = new_max;
    sum = sum * keep + warp_sum(weight);
    weights[lane] = weight;
    __syncwarp();
    for (float& a : acc) a *= keep;
    int begin = first > seen.begin ? first : seen.begin, end = first + 32 < seen.end ? first + 32 : seen.end;
    for (int u = begin; u < end; ++u) {
      const T* v = reinterpret_cast<const T*>(view.row(args.layer, 1, u, kv_head));
      float w = weights[u - first];
      for (int i = 0; i < kMaxHeadDim / 32; ++i)
        if (lane + 32 * i < dim) acc[i] += w * to_float(v[lane + 32 * i]);
    }
    __syncwarp();
  }
  for (int i = 0; i < kMaxHeadDim / 32; ++i)
    if (lane + 32 * i < dim) put(args.out, args.dtype, q + size_t(lane + 32 * i), acc[i] / sum);
}

template <class T>
void run(const CudaAttentionArgs& args, Stream& stream) {
  Shape shape = {.grid = unsigned(divide_up(args.step.n_tokens * args.n_heads, kWarps)),
                 .block = kWarps * 32,
                 .shared_bytes = shared_bytes<float>(kWarps * 32)};
  launch(naive_kernel<T>, "naive", shape, stream, args);
}

}  // namespace

void naive(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_tokens == 0) return;
  for_elements(args, [&]<class T>() { run<T>(args, stream); });
}

const char* naive_refuses(const CudaAttentionArgs& args, const Card&) {
  return args.layout.shape.head_dim > kMaxHeadDim ? "needs a head_dim of at most 256" : nullptr;
}

}  // namespace xpyd::attention::cuda_kernels
