// Split-KV decode on tensor cores: the query heads of one KV head, padded to 16, are the rows of mma.m16n8k16. A token
// of KV costs the same instructions for 1 head as for 16, few enough to hide behind its bytes. Each warp takes 16
// tokens of every tile of 64 through shared memory of its own, a tile ahead, so the loop has no barrier. Warps are
// merged in order at the end, splits by merge_splits.
#include "attention/cuda/attention_cuda_kernel.h"
#include "attention/cuda/attention_mma.h"

namespace xpyd::attention::cuda_kernels {
namespace {

constexpr int kRows = 16;  // query heads of a thread block
// Thread blocks of an SM, as its registers and, on sm_90, its shared memory allow. They have 96 KiB of KV in flight.
constexpr int kBlocks = 3;

// Pairs of floats from row to row of the merge's accumulators: the four rows that half a warp writes at once use
// different banks.
template <int kDim>
constexpr int kPitch = kDim / 2 + 4;

// The products of a thread block's warp with its tokens.
template <int kDim>
struct Wide {
  Tiles<kDim> kept;
  uint32_t a[kDim / 16][1][4];  // q: rows lane / 4 and + 8, dims 2 (lane % 4) and + 8

  __device__ explicit Wide(Carver& carver) : kept(carver) {}
  __device__ void take_q(const bf16* q, int n_heads, int lane) {
    for (int k = 0; k < kDim / 16; ++k)
      for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + i % 2 * 8, d = 16 * k + 2 * (lane % 4) + i / 2 * 8;
        a[k][0][i] = row < n_heads ? *reinterpret_cast<const uint32_t*>(q + row * kDim + d) : 0;
      }
  }
  __device__ void scores(float (&s)[1][kWarpTokens / 8][4], int tile, int warp, int lane) const {
    int at = kept.at(tile) + warp * kWarpTokens;
    for (int k = 0; k < kDim / 16; ++k) add_scores<kDim, 1, kWarpTokens>(s, a[k], k, kept.keys, at, lane);
  }
  __device__ void values(Rows<kDim, 1>& rows, float (&s)[1][kWarpTokens / 8][4], int tile, int warp, int lane) const {
    rows.template add_values<kWarpTokens>(s, kept.values, kept.at(tile) + warp * kWarpTokens, lane);
  }
  __device__ static void store(const Shared<float2>& accs, int at, const Rows<kDim, 1>& rows, int half, int lane) {
    for (int n = 0; n < kDim / 8; ++n)
      accs[at + 4 * n + lane % 4] = float2{rows.acc[0][n][2 * half], rows.acc[0][n][2 * half + 1]};
  }
};

template <int kDim>
constexpr size_t split_shared_bytes() {
  size_t kv = Tiles<kDim>::bytes();
  size_t merge = shared_bytes<float2>(kWarps * kRows * kPitch<kDim>) + 2 * shared_bytes<float>(kWarps * kRows);
  return kv > merge ? kv : merge;
}

// This kernel stays whole because its steps share registers and shared memory.
template <int kDim>
__global__ void __launch_bounds__(kThreads, kBlocks)
    split_mma_kernel(const __grid_constant__ CudaAttentionArgs args, const __grid_constant__ KvRows kv, int chunks) {
  // KV heads of a token are adjacent in memory: blocks that run together read whole pages of it.
  int kv_head = int(blockIdx.x) / chunks, chunk = int(blockIdx.x) % chunks;
  int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  SplitWork work = split_work(args, int(blockIdx.y));
  Tokens tokens = work.tokens;
  if (tokens.begin >= tokens.end) return;
  int group = args.n_heads / args.layout.shape.n_kv_heads;
  int head = kv_head * group + chunk * kRows;  // the first of this block
  int n_heads = group - chunk * kRows < kRows ? group - chunk * kRows : kRows;

  Carver carver;
  Wide<kDim> form(carver);
  const int32_t* table = table_of(args.step, work.seq);
  auto find = [&](int tile) {
    return find_rows(kv, table, kv_head, tile * kTileTokens + warp * kWarpTokens, tokens, lane);
  };

  int tile = tokens.begin / kTileTokens, end_tile = divide_up(tokens.end, kTileTokens);
  uint32_t next_rows = find(tile);
  form.kept.load(tile, args.pool, next_rows, warp, lane);
  cp_async_commit();
  next_rows = find(tile + 1);  // the block table is read one tile ahead of the copy, to hide its latency

  size_t q_at = (size_t(work.q_token) * size_t(args.n_heads) + size_t(head)) * kDim;
  form.take_q(static_cast<const bf16*>(args.q) + q_at, n_heads, lane);

  float scale = args.scale * kLog2E;
  Rows<kDim, 1> rows;
  rows.clear();
  for (; tile < end_tile; ++tile) {
    cp_async_wait<0>();
    __syncwarp();  // this tile has arrived, and no lane reads the tile before
    form.kept.load(tile + 1, args.pool, next_rows, warp, lane);
    cp_async_commit();
    next_rows = find(tile + 2);

    float s[1][kWarpTokens / 8][4] = {};
    form.scores(s, tile, warp, lane);
    int first = tile * kTileTokens + warp * kWarpTokens;
    if (first < tokens.begin || first + kWarpTokens > tokens.end)
      for (int n = 0; n < kWarpTokens / 8; ++n)
        for (int c = 0; c < 4; ++c) {
          int token = first + 8 * n + 2 * (lane % 4) + c % 2;
          if (token < tokens.begin || token >= tokens.end) s[0][n][c] = kNone;
        }
    rows.template weigh<kWarpTokens>(s, scale);
    form.values(rows, s, tile, warp, lane);
  }
  cp_async_wait<0>();
  __syncthreads();

  // The shared memory of KV is used again for [warp][row][dim] and the states of rows.
  Carver again;
  Shared<float2> accs = again.take<float2>(kWarps * kRows * kPitch<kDim>);
  Shared<float> maxima = again.take<float>(kWarps * kRows), sums = again.take<float>(kWarps * kRows);
  for (int half = 0; half < 2; ++half) {
    int row = warp * kRows + lane / 4 + 8 * half;
    float total = rows.total(0, half);
    if (lane % 4 == 0) maxima[row] = __fmul_rn(rows.max[0][half], scale), sums[row] = total;
    form.store(accs, row * kPitch<kDim>, rows, half, lane);
  }
  __syncthreads();
  for (int i = thread; i < n_heads * kDim / 2; i += kThreads) {
    int row = i / (kDim / 2), pair = i % (kDim / 2);
    float top = kNone, sum = 0;
    float2 acc = {0, 0};
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, maxima[w * kRows + row]);
    for (int w = 0; w < kWarps; ++w) {
      float factor = exp2_approx(maxima[w * kRows + row] - top);
      sum += sums[w * kRows + row] * factor;
      float2 part = accs[(w * kRows + row) * kPitch<kDim> + pair];
      acc.x += part.x * factor;
      acc.y += part.y * factor;
    }
    if (work.alone) {
      uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.out) + q_at);
      out[i] = pack_bf16(acc.x / sum, acc.y / sum);
    } else {
      float2* to = reinterpret_cast<float2*>(partial(args, int(blockIdx.y), head + row));
      to[pair] = acc;
      if (pair == 0) to[kDim / 2] = float2{top, sum};
    }
  }
}

template <int kDim>
void run(const CudaAttentionArgs& args, Stream& stream) {
  int n_kv_heads = args.layout.shape.n_kv_heads, chunks = divide_up(args.n_heads / n_kv_heads, kRows);
  Shape shape = {.grid = dim3(unsigned(n_kv_heads * chunks), unsigned(args.step.n_splits)),
                 .block = kThreads,
                 .shared_bytes = split_shared_bytes<kDim>()};
  launch(split_mma_kernel<kDim>, "split_mma", shape, stream, at_rows(args), rows_of(args), chunks);
}

}  // namespace

void split_mma(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_splits == 0) return;
  for_dim(args, [&]<int kDim>() { run<kDim>(args, stream); });
  merge_splits(args, stream);
}

}  // namespace xpyd::attention::cuda_kernels
