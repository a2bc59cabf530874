// Split-KV decode on tensor cores: the query heads of one KV head, padded to 16, are the rows of
// mma.m16n8k16, so that a token of KV costs the same instructions for 1 head as for 16, few enough
// to hide behind its bytes. Each warp takes 16 tokens of every tile of 64 (by position) through
// shared memory of its own, a tile ahead: no barrier in the loop. Warps are folded in order at the
// end, splits by merge_splits.
#include "attention/attention_cuda_rows.h"
#include "attention/attention_mma.h"

namespace xpyd::cuda::attention {
namespace {

constexpr int kRows = 16;   // query heads of a block
constexpr int kBlocks = 3;  // of an SM: what its registers and, on sm_90, its shared memory hold
constexpr int kStages = 2;  // tiles in shared memory; three blocks of an SM have 96 KiB under way

// Of the merge's accumulators, in pairs of floats: the four rows that half a warp writes at once
// lie in different banks.
template <int kDim>
constexpr int kPitch = kDim / 2 + 4;

template <class T, int kDim>
constexpr size_t split_shared_bytes() {
  size_t kv = Tiles<T, kDim, kStages>::bytes();
  size_t merge =
      shared_bytes<float2>(kWarps * kRows * kPitch<kDim>) + 2 * shared_bytes<float>(kWarps * kRows);
  return kv > merge ? kv : merge;
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocks)
    split_mma_kernel(const __grid_constant__ CudaAttentionArgs args,
                     const __grid_constant__ KvRows kv, int chunks) {
  // KV heads of a token are neighbours in memory: blocks that run together read whole pages of it.
  int kv_head = int(blockIdx.x) / chunks, chunk = int(blockIdx.x) % chunks;
  int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  SplitWork work = split_work(args, int(blockIdx.y));
  Tokens tokens = work.tokens;
  if (tokens.begin >= tokens.end) return;
  int group = args.n_heads / args.layout.shape.n_kv_heads;
  int head = kv_head * group + chunk * kRows;  // the first
  int n_heads = group - chunk * kRows < kRows ? group - chunk * kRows : kRows;

  Carver carver;
  Tiles<T, kDim, kStages> kept(carver);
  const int32_t* table = table_of(args.step, work.seq);
  auto find = [&](int tile) {
    return find_rows(kv, table, kv_head, tile * kTileTokens + warp * kWarpTokens, tokens, lane);
  };

  int tile = tokens.begin / kTileTokens, end_tile = divide_up(tokens.end, kTileTokens);
  uint32_t next_rows = find(tile);
  for (int i = 0; i < kStages - 1; ++i) {
    kept.load(tile + i, args.pool, next_rows, warp, lane);
    cp_async_commit();
    next_rows = find(tile + i + 1);  // a tile ahead of its copy: the block table is slow to answer
  }

  size_t q_at = (size_t(work.q_token) * size_t(args.n_heads) + size_t(head)) * kDim;
  const bf16* q = static_cast<const bf16*>(args.q) + q_at;
  uint32_t a[kDim / 16][1]
            [4];  // rows lane / 4 and + 8, dims 2 (lane % 4) and + 8, two elements each
  for (int k = 0; k < kDim / 16; ++k)
    for (int i = 0; i < 4; ++i) {
      int row = lane / 4 + i % 2 * 8, d = 16 * k + 2 * (lane % 4) + i / 2 * 8;
      a[k][0][i] = row < n_heads ? *reinterpret_cast<const uint32_t*>(q + row * kDim + d) : 0;
    }

  float scale = args.scale * kLog2E;
  Rows<kDim, 1> rows;
  rows.clear();
  for (; tile < end_tile; ++tile) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // this tile is there, and no lane reads the one before
    kept.load(tile + kStages - 1, args.pool, next_rows, warp, lane);
    cp_async_commit();
    next_rows = find(tile + kStages);
    if constexpr (kept.kCoded) {
      kept.ready(tile, warp, lane);
      __syncwarp();
    }

    int at = kept.at(tile) + warp * kWarpTokens;
    float s[1][kWarpTokens / 8][4] = {};
    for (int k = 0; k < kDim / 16; ++k)
      add_scores<kDim, 1, kWarpTokens>(s, a[k], k, kept.keys, at, lane);
    int first = tile * kTileTokens + warp * kWarpTokens;
    if (first < tokens.begin || first + kWarpTokens > tokens.end)
      for (int n = 0; n < kWarpTokens / 8; ++n)
        for (int c = 0; c < 4; ++c) {
          int token = first + 8 * n + 2 * (lane % 4) + c % 2;
          if (token < tokens.begin || token >= tokens.end) s[0][n][c] = kNone;
        }
    rows.template weigh<kWarpTokens>(s, scale);
    rows.template add_values<kWarpTokens>(s, kept.values, at, lane);
  }
  cp_async_wait<0>();
  __syncthreads();

  // What was KV becomes [warp][row][dim] and the rows' states.
  Carver again;
  Shared<float2> accs = again.take<float2>(kWarps * kRows * kPitch<kDim>);
  Shared<float> maxima = again.take<float>(kWarps * kRows),
                sums = again.take<float>(kWarps * kRows);
  for (int half = 0; half < 2; ++half) {
    int row = warp * kRows + lane / 4 + 8 * half;
    float total = rows.total(0, half);
    if (lane % 4 == 0) maxima[row] = __fmul_rn(rows.max[0][half], scale), sums[row] = total;
    for (int n = 0; n < kDim / 8; ++n)
      accs[row * kPitch<kDim> + 4 * n + lane % 4] =
          float2{rows.acc[0][n][2 * half], rows.acc[0][n][2 * half + 1]};
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

template <class T, int kDim>
void run(const CudaAttentionArgs& args, Stream& stream) {
  int n_kv_heads = args.layout.shape.n_kv_heads,
      chunks = divide_up(args.n_heads / n_kv_heads, kRows);
  Shape shape = {.grid = dim3(unsigned(n_kv_heads * chunks), unsigned(args.step.n_splits)),
                 .block = kThreads,
                 .shared_bytes = split_shared_bytes<T, kDim>()};
  launch(split_mma_kernel<T, kDim>, "split_mma", shape, stream, args, rows_of(args), chunks);
}

}  // namespace

void split_mma(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_splits == 0) return;
  for_kv(args, [&]<class T, int kDim>() { run<T, kDim>(args, stream); });
  merge_splits(args, stream);
}

}  // namespace xpyd::cuda::attention
