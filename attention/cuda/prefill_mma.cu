// FlashAttention-2 (Dao 2023) with mma.sync. A thread block holds 64 or 128 query rows of one head, 16 or 32 per warp,
// and goes through KV in tiles of 64 tokens; cp.async copies the next tile while this one is computed. Lesson: scores
// stay in registers, because two accumulator fragments of Q K^T are one operand fragment of P V. With 32 rows per warp,
// each piece of K and V that ldmatrix loads feeds two mma; with 16, shared memory (128 bytes per clock) would bind
// before the tensor cores do.
//
// A row's bits do not depend on the other rows: tiles that it does not see change nothing, and a masked weight is 0. V
// of every token that some row of the block sees must therefore be finite. Other rows are not read.
#include "attention/cuda/attention_cuda_kernel.h"
#include "attention/cuda/attention_mma.h"

namespace xpyd::attention::cuda_kernels {
namespace {

constexpr int kStepTokens = 32;  // of online softmax; with 64, 32 rows of head_dim 128 need over 255 registers

template <int kDim, int kRowTiles>
constexpr size_t flash_shared_bytes() {
  return shared_bytes<bf16>(kWarps * 16 * kRowTiles * kDim) + Tiles<kDim>::bytes();
}

// This kernel stays whole because its steps share registers and shared memory.
template <int kDim, int kRowTiles>
__global__ void flash_mma_kernel(const __grid_constant__ CudaAttentionArgs args, const __grid_constant__ KvRows kv) {
  constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  const CudaStep& step = args.step;
  int head = int(blockIdx.x), seq = int(blockIdx.z);
  int q_begin = step.q_offsets[seq], n_q = step.q_offsets[seq + 1] - q_begin;
  int q_first = int(gridDim.y - 1 - blockIdx.y) * kRows;  // the rows with most work start first
  if (q_first >= n_q) return;
  int n_rows = n_q - q_first < kRows ? n_q - q_first : kRows;
  int position = step.kv_lengths[seq] - n_q + q_first;  // the position of row 0
  Tokens readable = {visible(position, args.sliding_window).begin, position + n_rows};
  int tile = readable.begin / kTileTokens, end_tile = divide_up(readable.end, kTileTokens);

  int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  Carver carver;
  Shared<bf16> q = carver.take<bf16>(kRows * kDim);
  Tiles<kDim> kept(carver);

  int kv_head = head / (args.n_heads / args.layout.shape.n_kv_heads);
  const int32_t* table = table_of(step, seq);
  auto find = [&](int t) {
    return find_rows(kv, table, kv_head, t * kTileTokens + warp * kWarpTokens, readable, lane);
  };

  const bf16* q_rows = static_cast<const bf16*>(args.q) +
                       (size_t(q_begin + q_first) * size_t(args.n_heads) + size_t(head)) * kDim;
  size_t q_stride = size_t(args.n_heads) * kDim;
  for (int i = thread; i < kRows * (kDim / 8); i += kThreads) {
    int row = i / (kDim / 8), piece = i % (kDim / 8);
    bool valid = row < n_rows;
    cp_async_16(q, swizzled<kDim>(row, piece), q_rows + size_t(valid ? row : 0) * q_stride + piece * 8, valid);
  }
  uint32_t next_rows = find(tile);  // the block table is read one tile ahead of the copy, to hide its latency

  float scale = args.scale * kLog2E;
  Rows<kDim, kRowTiles> rows;
  rows.clear();
  int warp_row = warp * kWarpRows;
  int last_row = warp_row + kWarpRows < n_rows ? warp_row + kWarpRows - 1 : n_rows - 1;
  Tokens seen_by_first = visible(position + warp_row, args.sliding_window);
  Tokens seen_by_last = visible(position + last_row, args.sliding_window);

  for (--tile; tile < end_tile; ++tile) {  // the first iteration only starts copies
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and no warp reads the tile before
    if (tile + 1 < end_tile) {
      kept.load(tile + 1, args.pool, next_rows, warp, lane);
      next_rows = find(tile + 2);
    }
    cp_async_commit();

    for (int part = 0; part < kTileTokens; part += kStepTokens) {
      int first = tile * kTileTokens + part, at = kept.at(tile) + part;
      if (warp_row >= n_rows || first >= seen_by_last.end || first + kStepTokens <= seen_by_first.begin) continue;
      float s[kRowTiles][kStepTokens / 8][4] = {};
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[kRowTiles][4];
        for (int i = 0; i < kRowTiles; ++i)
          ldmatrix_x4(a[i], q, in_step(swizzled<kDim>(warp_row + lane % 16, lane / 16), k) + 16 * i * kDim);
        add_scores<kDim, kRowTiles, kStepTokens>(s, a, k, kept.keys, at, lane);
      }
      if (first + kStepTokens > seen_by_first.end || first < seen_by_last.begin)
        for (int i = 0; i < kRowTiles; ++i)
          for (int half = 0; half < 2; ++half) {
            int row = warp_row + 16 * i + 8 * half + lane / 4;  // rows after the last see what the last sees
            // Of this lane's columns, 8 n + c, the row sees those in (before, last].
            int last = position + (row < n_rows ? row : n_rows - 1) - first - 2 * (lane % 4);
            int before = args.sliding_window ? last - args.sliding_window : -1;
            for (int n = 0; n < kStepTokens / 8; ++n)
              for (int c = 0; c < 2; ++c)
                if (8 * n + c > last || 8 * n + c <= before) s[i][n][2 * half + c] = kNone;
          }
      rows.template weigh<kStepTokens>(s, scale);
      rows.template add_values<kStepTokens>(s, kept.values, at, lane);
    }
  }

  bf16* out = static_cast<bf16*>(args.out) + (q_rows - static_cast<const bf16*>(args.q));
  for (int i = 0; i < kRowTiles; ++i)
    for (int half = 0; half < 2; ++half) {
      float inverse = 1 / rows.total(i, half);
      int row = warp_row + 16 * i + 8 * half + lane / 4;
      if (row >= n_rows) continue;
      for (int n = 0; n < kDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(out + size_t(row) * q_stride + 8 * n + 2 * (lane % 4)) = pack_bf16(
            rows.acc[i][n][2 * half] * inverse, rows.acc[i][n][2 * half + 1] * inverse);
    }
}

template <int kDim, int kRowTiles>
void run(const CudaAttentionArgs& args, Stream& stream) {
  unsigned tiles = unsigned(divide_up(args.step.max_q_tokens, kWarps * 16 * kRowTiles));
  Shape shape = {.grid = dim3(unsigned(args.n_heads), tiles, unsigned(args.step.n_seqs)),
                 .block = kThreads,
                 .shared_bytes = flash_shared_bytes<kDim, kRowTiles>()};
  launch(flash_mma_kernel<kDim, kRowTiles>, "flash_mma", shape, stream, at_rows(args), rows_of(args));
}

}  // namespace

void flash_mma(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_seqs == 0 || args.step.max_q_tokens == 0) return;
  bool narrow = args.step.max_q_tokens <= kWarps * 16;
  for_dim(args, [&]<int kDim>() { narrow ? run<kDim, 1>(args, stream) : run<kDim, 2>(args, stream); });
}

const char* mma_refuses(const CudaAttentionArgs& args, const Card&) {
  if (args.dtype != Dtype::bf16) return "needs bf16 queries";
  if (args.layout.shape.dtype != Dtype::bf16) return "needs bf16 KV";
  int dim = args.layout.shape.head_dim;
  return dim == 64 || dim == 128 ? nullptr : "needs head_dim 64 or 128";
}

}  // namespace xpyd::attention::cuda_kernels
