// FlashAttention-3 (Shah et al. 2024) for Hopper: two warps only start copies; two or three warpgroups only compute, 64
// query rows each. Lessons:
//   §3.1  Warps are specialised. The copy engine (TMA) fetches whole boxes of K and V into a ring of two stages,
//         which mbarriers hand over. Computing threads spend no instructions or registers on copies, and
//         registers move from the copying warpgroup to the computing ones.
//   §3.1  Warpgroups take turns (ping-pong): the products of one run during the exponentials of another.
//   §3.2  Within a warpgroup, the scores of tile j are in flight together with the weights of tile j - 1 times V,
//         and the softmax of tile j begins before that product is done.
// Rows are (token, query head of the KV head) pairs, so that all heads of a group share each copy.
//
// A row's bits do not depend on the other rows: tiles are cut from position 0, and a tile that a row does not see
// changes nothing. V of every token that some row of the block sees must therefore be finite. V of other tokens becomes
// zeros in shared memory, and their scores are replaced.
#include "attention/cuda/attention_cuda_kernel.h"
#include "base/cuda/cuda_kernel_sm90.h"

namespace xpyd::attention::cuda_kernels {
namespace {

constexpr int kTile = 128;  // tokens of one online-softmax step
constexpr int kStages = 2;
constexpr int kSmallBox = 8;                         // tokens; a box of 128-byte rows cannot have fewer
constexpr int kGroupThreads = 128, kGroupRows = 64;  // of a warpgroup

template <int kDim>
struct Plan {
  // The computing warpgroups. With head_dim 64, exponentials take as long as the products, and three warpgroups hide
  // more of them than two.
  static constexpr int kGroups = kDim == 64 ? 3 : 2;
  static constexpr int kRows = kGroups * kGroupRows, kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kHalves = kDim / kBoxColumns;  // boxes side by side in a row
  // Of 64 Ki registers each thread gets 65,536 / kThreads at first, and then these.
  static constexpr int kCopyRegisters = kGroups == 3 ? 32 : 40, kComputeRegisters = kGroups == 3 ? 160 : 232;
  // Otherwise a warpgroup would wait for registers that nobody releases. The kernel begins with a multiple of 8 each.
  static_assert((kCopyRegisters + kGroups * kComputeRegisters) * kGroupThreads <= 65536 / kThreads / 8 * 8 * kThreads);
  static constexpr size_t kSharedBytes = shared_bytes<bf16>(kRows * kDim) +
                                         2 * kStages * shared_bytes<bf16>(kTile * kDim) +
                                         shared_bytes<uint64_t>(4 * kStages + 2);
};

// The mbarriers. `full`: the copies of a stage have arrived. `free`: all computing warps are done with a stage.
// `landed`: one for each copying warp, for its own waits.
constexpr int kFullKeys = 0, kFullValues = kStages, kFreeKeys = 2 * kStages, kFreeValues = 3 * kStages,
              kLanded = 4 * kStages, kBarriers = 4 * kStages + 2;
// Ids of named barriers: one inside each warpgroup, and one for its turn.
constexpr int kOwnBarrier = 1, kTurnBarrier = 4;

// The length of a paged sequence for copy_tiles(): whole blocks are mapped.
constexpr int kEveryBlock = 1 << 30;

// The pool as a matrix for the copy engine. A row is the memory from one token to the next of its block; in it, K or V
// of one layer and head is head_dim columns.
struct PoolMatrix {
  KvRows kv;
  int rows;
  int box_rows;  // tokens of a box
};

// The state of a copying warp. The first warp copies K and the second V, because small boxes start one after the other
// and two warps start them in parallel. The warps have few registers, so copy_tile() is compiled twice.
struct Copying {
  int v;                   // 0: K, 1: V
  const std::byte* bytes;  // the pool
  const PoolMatrix& pool;
  const TensorMap& map;
  const int32_t* table;
  int kv_head;
  Tokens readable;
  int length;  // tokens in the sequence
  const Shared<bf16>& tiles;
  const Shared<uint64_t>& barriers;
};

// This lane's box of a tile: its first token (counted from the tile's), its tokens, whether it is copied, and whether
// any of its tokens is readable.
template <int kDim, bool kWhole>
struct Box {
  int first, rows, boxed;  // boxed: tokens of the tile that boxes copy
  bool copies, seen;
  __device__ __forceinline__ Box(const Copying& c, int tile) {
    int lane = int(threadIdx.x) % 32, begin = tile * kTile;
    boxed = kWhole ? kTile : (c.length - begin) / kSmallBox * kSmallBox;
    rows = kWhole ? c.pool.box_rows : kSmallBox;
    first = lane / Plan<kDim>::kHalves * rows;
    copies = first < boxed;
    seen = copies && begin + first < c.readable.end && begin + first + rows > c.readable.begin;
  }
  __device__ __forceinline__ uint32_t find(const Copying& c, int tile) const {
    return seen ? c.pool.kv.row(c.table, c.v, tile * kTile + first, c.kv_head) : 0;
  }
};

// A warp copies K or V of one tile, the i-th; each lane starts its box, which is at `kv_row`. Tile `v` of stage `stage`
// is `tiles`[v][stage].
//
// kWhole: the sequence has all tokens of the tile. Otherwise it ends in the tile, and contiguous memory may have no
// pages behind (vAttention): `map` then has small boxes, and the last tokens are copied by load and store.
template <int kDim, bool kWhole>
__device__ __forceinline__ void copy_tile(const Copying& c, int tile, int i, uint32_t kv_row, int& n_landed) {
  using P = Plan<kDim>;
  int lane = int(threadIdx.x) % 32, half = lane % P::kHalves, begin = tile * kTile;
  const auto [first, box_rows, boxed, copies, seen] = Box<kDim, kWhole>(c, tile);
  // A box without readable tokens is placed outside of the matrix, where copies give zeros.
  int row = c.pool.rows, column = 0;
  if (seen) {
    row = int(kv_row / c.pool.kv.token);
    column = int(kv_row % c.pool.kv.token) * kDim + half * kBoxColumns;
  }
  int at = (c.v * kStages + i % kStages) * kTile * kDim;
  int full = (c.v ? kFullValues : kFullKeys) + i % kStages;
  // Whether this warp edits the tile after the boxes have arrived.
  bool touched = !kWhole || (c.v && (begin < c.readable.begin || begin + kTile > c.readable.end));
  int lands = touched ? kLanded + c.v : full;
  mbarrier_wait(c.barriers, (c.v ? kFreeValues : kFreeKeys) + i % kStages, (i / kStages + 1) % 2);
  if (lane == 0) mbarrier_expect(c.barriers, lands, boxed * kDim * 2);
  __syncwarp();
  if (copies) copy_box(c.tiles, at + (half * kTile + first) * kBoxColumns, c.map, column, row, c.barriers, lands);
  if (!touched) return;
  // This concerns at most two tiles of a block, the first and the last: V that must not be read becomes zeros.
  mbarrier_wait(c.barriers, lands, n_landed++ % 2);
#pragma unroll 1
  for (int j = lane; j < kTile * kDim / 8; j += 32) {  // pieces of 16 bytes, 8 per half row
    int t = j / 8 % kTile, piece = j % 8;
    bool readable = begin + t >= c.readable.begin && begin + t < c.readable.end;
    if (kWhole ? readable : t < boxed && (readable || !c.v)) continue;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (!kWhole && readable) {
      size_t from = size_t(c.pool.kv.row(c.table, c.v, begin + t, c.kv_head)) * kDim +
                    size_t(j / (8 * kTile) * kBoxColumns + piece * 8);
      x = *reinterpret_cast<const uint4*>(c.bytes + from * sizeof(bf16));
    }
    store_16(c.tiles, at + j / 8 * kBoxColumns + (piece ^ (j / 8 % 8)) * 8, x);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(c.barriers, full);
}

// A copying warp: it copies tile after tile, as fast as stages become free. `small` is the map of small boxes.
template <int kDim>
__device__ inline void copy_tiles(Copying c, const TensorMap& small) {
  int tile = c.readable.begin / kTile, i = 0, n_landed = 0;
  const int end = divide_up(c.readable.end, kTile), whole_end = min(end, c.length / kTile);
  // The block table is read one tile ahead, so that its latency passes while stages become free.
  auto find = [&](int of) { return of < whole_end ? Box<kDim, true>(c, of).find(c, of) : 0; };
  for (uint32_t next = find(tile); tile < whole_end; ++tile, ++i) {
    uint32_t now = next;
    next = find(tile + 1);
    copy_tile<kDim, true>(c, tile, i, now, n_landed);
  }
  if (tile < end)
    copy_tile<kDim, false>({c.v, c.bytes, c.pool, small, c.table, c.kv_head, c.readable, c.length, c.tiles, c.barriers},
                           tile, i, Box<kDim, false>(c, tile).find(c, tile), n_landed);
}

// 64 rows of a computing warpgroup, as wgmma distributes them over its threads: a thread has parts of rows lane / 4 and
// lane / 4 + 8 of its warp's 16, two columns of each block of 8.
template <int kDim>
struct Computing {
  using P = Plan<kDim>;
  float max[2], sum[2], keep[2];  // max: over dot products, not scaled; sum: over this thread's columns
  float s[kTile / 8][4];          // scores, then weights
  uint32_t p[kTile / 16][4];      // weights in bf16
  float acc[kDim / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) max[half] = kNone, sum[half] = 0;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[n][c] = 0;
  }

  // Starts s = Q K^T.
  __device__ __forceinline__ void start_scores(uint64_t q, uint64_t keys) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      int half = k / 4, inside = k % 4 * 32;  // bytes of 16 elements
      wgmma_shared(s, advance(q, half * P::kRows * 128 + inside), advance(keys, half * kTile * 128 + inside), k > 0);
    }
    wgmma_commit();
  }
  // Starts acc += p V.
  __device__ __forceinline__ void start_values(uint64_t values) {
    keep_operands(acc);
    keep_operands(p);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) wgmma_registers(acc, p[k], advance(values, k * 16 * 128));
    wgmma_commit();
  }

  // Masks scores: of this thread's columns, 8 n + c, row `half` sees those in (before[half], last[half]].
  __device__ __forceinline__ void mask(const int (&last)[2], const int (&before)[2]) {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (8 * n + c % 2 > last[c / 2] || 8 * n + c % 2 <= before[c / 2]) s[n][c] = kNone;
  }

  // Turns scores into weights, 2^(scale (s - maximum)). A row that sees none of these tokens (all scores -inf) keeps
  // its bits: its factor is exactly 1, or 0 over zeros.
  __device__ __forceinline__ void weigh(float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      float base = top == kNone ? 0 : __fmul_rn(top, scale), added = 0;
      keep[half] = exp2_approx(__fmul_rn(max[half], scale) - base);
      max[half] = top;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          s[n][c] = exp2_approx(__fmaf_rn(s[n][c], scale, -base));
          added += s[n][c];
        }
      sum[half] = __fmaf_rn(sum[half], keep[half], added);
    }
  }
  // Rescales what was summed before to the new maximum.
  __device__ __forceinline__ void rescale() {
    if (!__any_sync(0xffffffffu, keep[0] != 1 || keep[1] != 1)) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[n][c] *= keep[c / 2];
  }
  // The fragment of the scores is the fragment of the operand (PTX ISA: D and A of m64nNk16).
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) p[k][j] = pack_bf16(s[2 * k + j / 2][j % 2 * 2], s[2 * k + j / 2][j % 2 * 2 + 1]);
  }
};

// Warpgroups take turns at starting products: 0, 1, .., 0, 1, .. Each has one turn per tile.
template <int kGroups>
__device__ inline void wait_turn(int group, bool first) {
  if (group > 0 || !first) barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
}
template <int kGroups>
__device__ inline void pass_turn(int group, bool last) {
  if (group < kGroups - 1 || !last) barrier_arrive(kTurnBarrier + (group + 1) % kGroups, 2 * kGroupThreads);
}

// This kernel stays whole because its steps share registers and shared memory.
template <int kDim>
__global__ void __launch_bounds__(Plan<kDim>::kThreads, 1)
    flash_wgmma_kernel(const __grid_constant__ CudaAttentionArgs args, const __grid_constant__ PoolMatrix pool,
                       const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap small) {
  using P = Plan<kDim>;
  const CudaStep& step = args.step;
  int kv_head = int(blockIdx.y), seq = int(blockIdx.z);
  int heads = args.n_heads / args.layout.shape.n_kv_heads;
  int q_begin = step.q_offsets[seq], n_q = step.q_offsets[seq + 1] - q_begin;
  // Row token * heads + head is that query token and head of the group. Rows with most work start first; KV heads
  // follow one another, so that L2 holds the K and V of one.
  int first_row = int(gridDim.x - 1 - blockIdx.x) * P::kRows, n_rows = n_q * heads - first_row;
  if (n_rows <= 0) return;
  if (n_rows > P::kRows) n_rows = P::kRows;
  int start = step.kv_lengths[seq] - n_q;  // the position of this step's first token
  Tokens readable = {visible(start + first_row / heads, args.sliding_window).begin,
                     start + (first_row + n_rows - 1) / heads + 1};

  Carver carver;
  Shared<bf16> q = carver.take<bf16>(P::kRows * kDim);  // [half][row][64], swizzled
  // [K|V][stage][half][token][64], swizzled
  Shared<bf16> tiles = carver.take<bf16>(2 * kStages * kTile * kDim);
  Shared<uint64_t> barriers = carver.take<uint64_t>(kBarriers);
  int thread = int(threadIdx.x);
  if (thread == 0) {
    for (int i = 0; i < kBarriers; ++i) mbarrier_init(barriers, i, i < kFreeKeys || i >= kLanded ? 1 : 4 * P::kGroups);
    mbarrier_init_done();
  }
  __syncthreads();

  if (thread < kGroupThreads) {
    set_max_registers<P::kCopyRegisters, false>();
    if (thread < 64)
      copy_tiles<kDim>({thread / 32, args.pool, pool, map, table_of(step, seq), kv_head, readable,
                        step.contiguous ? step.kv_lengths[seq] : kEveryBlock, tiles, barriers},
                       small);
    return;
  }
  set_max_registers<P::kComputeRegisters, true>();
  int group = thread / kGroupThreads - 1, in_group = thread % kGroupThreads;
  int warp = in_group / 32, lane = thread % 32;
  int group_row = group * kGroupRows;

  // The index of row `row` of the block in q and out.
  auto place = [&](int row) {
    int token = (first_row + row) / heads, head = (first_row + row) % heads;
    return (size_t(q_begin + token) * size_t(args.n_heads) + size_t(kv_head * heads + head)) * kDim;
  };
  for (int i = in_group; i < kGroupRows * (kDim / 8); i += kGroupThreads) {
    int row = group_row + i / (kDim / 8), piece = i % (kDim / 8);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < n_rows)
      value = *reinterpret_cast<const uint4*>(static_cast<const bf16*>(args.q) + place(row) + piece * 8);
    store_16(q, ((piece / 8) * P::kRows + row) * kBoxColumns + ((piece % 8) ^ (row & 7)) * 8, value);
  }
  fence_proxy_async();
  barrier_sync(kOwnBarrier + group, kGroupThreads);

  uint64_t q_matrix = matrix_descriptor(shared_address(q, group_row * kBoxColumns));
  uint64_t key_matrix = matrix_descriptor(shared_address(tiles, 0));
  uint64_t value_matrix = matrix_descriptor(shared_address(tiles, kStages * kTile * kDim), kTile * 128);
  constexpr int kStageBytes = kTile * kDim * 2;
  float scale = args.scale * kLog2E;
  int position[2];  // rows after the last see what the last sees
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = group_row + 16 * warp + 8 * half + lane / 4;
    position[half] = start + (first_row + (row < n_rows ? row : n_rows - 1)) / heads;
  }

  Computing<kDim> rows;
  rows.clear();
  auto softmax = [&](int tile) {
    int first = tile * kTile;
    // If every thread of the warp sees all of the tile, there is nothing to mask.
    bool all = first + kTile <= position[0] + 1 && (!args.sliding_window || first > position[1] - args.sliding_window);
    if (!__all_sync(0xffffffffu, all)) {
      int last[2], before[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        last[half] = position[half] - first - 2 * (lane % 4);
        before[half] = args.sliding_window ? last[half] - args.sliding_window : -1;
      }
      rows.mask(last, before);
    }
    rows.weigh(scale);
  };
  auto give_back = [&](int barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers, barrier);
  };

  int begin = readable.begin / kTile, n_tiles = divide_up(readable.end, kTile) - begin;
  mbarrier_wait(barriers, kFullKeys, 0);
  wait_turn<P::kGroups>(group, true);
  rows.start_scores(q_matrix, key_matrix);
  pass_turn<P::kGroups>(group, n_tiles == 1);
  wgmma_wait<0>();
  keep_operands(rows.s);
  give_back(kFreeKeys);
  softmax(begin);
  rows.pack();  // acc is zero, so it needs no rescaling

  for (int i = 1; i < n_tiles; ++i) {
    int stage = i % kStages, past = (i - 1) % kStages;
    mbarrier_wait(barriers, kFullKeys + stage, i / kStages % 2);
    wait_turn<P::kGroups>(group, false);
    rows.start_scores(q_matrix, advance(key_matrix, stage * kStageBytes));
    mbarrier_wait(barriers, kFullValues + past, (i - 1) / kStages % 2);
    rows.start_values(advance(value_matrix, past * kStageBytes));
    pass_turn<P::kGroups>(group, i == n_tiles - 1);
    wgmma_wait<1>();
    keep_operands(rows.s);
    give_back(kFreeKeys + stage);
    softmax(begin + i);
    // This barrier is complete already. Its branch matters: without one, ptxas (13.0) moves the wait for the product to
    // before the softmax.
    mbarrier_wait(barriers, kFullValues + past, (i - 1) / kStages % 2);
    wgmma_wait<0>();
    keep_operands(rows.acc);
    give_back(kFreeValues + past);
    rows.rescale();
    rows.pack();
  }
  int last_stage = (n_tiles - 1) % kStages;
  mbarrier_wait(barriers, kFullValues + last_stage, (n_tiles - 1) / kStages % 2);
  rows.start_values(advance(value_matrix, last_stage * kStageBytes));
  wgmma_wait<0>();
  keep_operands(rows.acc);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = rows.sum[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    float inverse = 1 / total;
    int row = group_row + 16 * warp + 8 * half + lane / 4;
    if (row >= n_rows) continue;
    bf16* out = static_cast<bf16*>(args.out) + place(row) + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      *reinterpret_cast<uint32_t*>(out + 8 * n) = pack_bf16(rows.acc[n][2 * half] * inverse,
                                                            rows.acc[n][2 * half + 1] * inverse);
  }
}

// Tokens of a box: as many of a tile as are adjacent in every block.
int box_rows_of(const CudaAttentionArgs& args) {
  int block = args.layout.block_tokens;
  return args.step.contiguous || block >= kTile ? kTile : block;
}

template <int kDim>
void run(const CudaAttentionArgs& args, Stream& stream) {
  using P = Plan<kDim>;
  const KvLayout& layout = args.layout;
  size_t stride = layout.token_stride();
  PoolMatrix pool{rows_of(args), int(bytes_of_rows(layout) / stride), box_rows_of(args)};
  BoxedMatrix matrix{.data = at_rows(args).pool,
                     .rows = size_t(pool.rows),
                     .columns = stride / dtype_bytes(Dtype::bf16),
                     .row_stride = stride,
                     .box_rows = pool.box_rows};
  TensorMap map = make_tensor_map(matrix);
  matrix.box_rows = kSmallBox;
  TensorMap small = make_tensor_map(matrix);
  int heads = args.n_heads / layout.shape.n_kv_heads;
  Shape shape = {.grid = dim3(unsigned(divide_up(args.step.max_q_tokens * heads, P::kRows)),
                              unsigned(layout.shape.n_kv_heads), unsigned(args.step.n_seqs)),
                 .block = unsigned(P::kThreads),
                 .shared_bytes = P::kSharedBytes};
  launch(flash_wgmma_kernel<kDim>, "flash_wgmma", shape, stream, at_rows(args), pool, map, small);
}

}  // namespace

void flash_wgmma(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_seqs == 0 || args.step.max_q_tokens == 0) return;
  if (args.layout.shape.head_dim == 64) return run<64>(args, stream);
  XPYD_CHECK(args.layout.shape.head_dim == 128);
  run<128>(args, stream);
}

const char* wgmma_refuses(const CudaAttentionArgs& args, const Card& card) {
  if (card.major != 9 || card.minor != 0) return "needs sm_90";
  if (const char* why = mma_refuses(args, card)) return why;
  int block = args.layout.block_tokens;
  if (!args.step.contiguous && (block < 8 || (kTile % block != 0 && block % kTile != 0)))
    return "needs blocks of 8, 16, 32, 64 or a multiple of 128 tokens";
  return nullptr;
}

}  // namespace xpyd::attention::cuda_kernels
