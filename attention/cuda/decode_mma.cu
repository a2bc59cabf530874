// Split-KV decode on tensor cores: the query heads of one KV head, padded to 16, are the rows of mma.m16n8k16. A token
// of KV costs the same instructions for 1 head as for 16, few enough to hide behind its bytes. Each warp takes 16
// tokens of every tile of 64 through shared memory of its own, a tile ahead, so the loop has no barrier. Warps are
// merged in order at the end, splits by merge_splits.
//
// Codes of int8 and int4 are multiplied exactly, as they are, and never stored as bf16. Each lane reads the words that
// hold the elements which the mma takes from it; the order of dims is permuted, equally for q and the result. Scale and
// zero of a key are applied to its scores, those of a value to its weights: sum w (s c + z) = sum (w s) c + sum w z.
#include "attention/cuda/attention_cuda_kernel.h"
#include "attention/cuda/attention_mma.h"

namespace xpyd::attention::cuda_kernels {
namespace {

constexpr int kRows = 16;   // query heads of a thread block
constexpr int kBlocks = 3;  // thread blocks of an SM, as its registers and, on sm_90, its shared memory allow
// Tiles in shared memory. Three blocks of an SM have 96 KiB of bf16 in flight, 99 KiB of int8 or 77 KiB of int4.
template <class T>
constexpr int kStages = kCodeBits<T> == 0   ? 2
                        : kCodeBits<T> == 8 ? 3
                                            : 4;

// Pairs of floats from row to row of the merge's accumulators: the four rows that half a warp writes at once use
// different banks.
template <int kDim>
constexpr int kPitch = kDim / 2 + 4;

template <int kDim>
struct Wide {  // bf16: rows of KV as stored
  static constexpr int kAhead = kStages<bf16> - 1;
  Tiles<bf16, kDim, kStages<bf16>> kept;
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

// Of keys, lane l takes dims [kDim / 4 (l % 4), + kDim / 4) of token l / 4. A 16-wide step of head_dim uses four of
// them: a word of int8, or half a word of int4. Of values, it takes dims [kDim / 8 (l / 4), + kDim / 8) of four tokens.
template <int kBits, int kDim>
struct Coded {
  using T = QuantisedRow<kBits>;
  static constexpr int kAhead = kStages<T> - 1, kWords = kDim * kBits / 32;
  CodeTiles<kBits, kDim, kStages<T>> kept;
  uint32_t a[kDim / 16][1][4];
  float q_sum[2];  // rows lane / 4 and + 8
  Centred<kBits> centred;

  __device__ explicit Coded(Carver& carver) : kept(carver) {}
  __device__ void take_q(const bf16* q, int n_heads, int lane) {
    for (int half = 0; half < 2; ++half) {
      int row = lane / 4 + half * 8;
      float sum = 0;
      for (int k = 0; k < kDim / 16; ++k) {
        // One shift brings elements e and e + kApart of a word to its two halves.
        constexpr int kApart = 16 / kBits, kSteps = 8 / kBits;  // steps per word: 1 or 2
        bf16 x[4];
        for (int j = 0; j < 4; ++j) {
          int d = kDim / 4 * (lane % 4) + k / kSteps * 2 * kApart + k % kSteps * 2 + j / 2 + j % 2 * kApart;
          x[j] = row < n_heads ? q[row * kDim + d] : bf16{};
          sum += to_f32(x[j]);
        }
        for (int i = 0; i < 2; ++i) a[k][0][2 * i + half] = uint32_t(x[2 * i].bits) | uint32_t(x[2 * i + 1].bits) << 16;
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      q_sum[half] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }
  }
  __device__ int first(int tile, int warp) const { return tile % kStages<T> * kTileTokens + warp * kWarpTokens; }
  __device__ void scores(float (&s)[1][kWarpTokens / 8][4], int tile, int warp, int lane) const {
    int row = first(tile, warp);
    for (int n = 0; n < kWarpTokens / 8; ++n) {
      constexpr int kMine = kWords / 4;
      uint32_t words[kMine];
      load_words(words, kept.codes, (row + 8 * n + lane / 4) * kept.kPitch + lane % 4 * kMine);
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t word = kBits == 8 ? words[k] : words[k / 2] >> k % 2 * 8;
        mma_m16n8k16(s[0][n], a[k][0], centred(word), centred(word >> kBits));
      }
      for (int c = 0; c < 4; ++c) {
        float2 scale = centred_scale<kBits>(kept.scales[row + 8 * n + 2 * (lane % 4) + c % 2]);
        s[0][n][c] = __fmaf_rn(s[0][n][c], scale.x, __fmul_rn(q_sum[c / 2], scale.y));
      }
    }
  }
  __device__ void values(Rows<kDim, 1>& rows, float (&s)[1][kWarpTokens / 8][4], int tile, int warp, int lane) const {
    int row = kept.kKept + first(tile, warp);
    constexpr int kMine = kWords / 8;
    uint32_t words[4][kMine], p[4];
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < 2; ++e) {
        int token = row + 8 * n + 2 * (lane % 4) + e;
        load_words(words[2 * n + e], kept.codes, token * kept.kPitch + lane / 4 * kMine);
        float2 scale = centred_scale<kBits>(kept.scales[token]);
        for (int half = 0; half < 2; ++half) {
          float& weight = s[0][n][2 * half + e];
          rows.shift[0][half] = __fmaf_rn(weight, scale.y, rows.shift[0][half]);
          weight = __fmul_rn(weight, scale.x);
        }
      }
    for (int j = 0; j < 4; ++j) p[j] = pack_bf16(s[0][j / 2][j % 2 * 2], s[0][j / 2][j % 2 * 2 + 1]);
    for (int w = 0; w < kMine; ++w)
      for (int i = 0; i < 32 / kBits; ++i) {  // one dim per lane
        uint32_t b[2];
        for (int n = 0; n < 2; ++n) {
          uint32_t low = words[2 * n][w], high = words[2 * n + 1][w];
          if constexpr (kBits == 8)
            b[n] = centred(byte_perm(low, high, 0x0400u + 0x0101u * unsigned(i)));
          else
            b[n] = centred(byte_perm(low, high, i < 4 ? 0x5410 : 0x7632) >> i % 4 * 4);
        }
        mma_m16n8k16(rows.acc[0][w * 32 / kBits + i], p, b[0], b[1]);
      }
  }
  // Column j of the n-th block of 8 is dim kDim / 8 j + n.
  __device__ static void store(const Shared<float2>& accs, int at, const Rows<kDim, 1>& rows, int half, int lane) {
    float shift = rows.total(rows.shift, 0, half);
    for (int n = 0; n < kDim / 8; n += 2)
      for (int e = 0; e < 2; ++e)
        accs[at + (kDim / 8 * (2 * (lane % 4) + e) + n) / 2] = float2{rows.acc[0][n][2 * half + e] + shift,
                                                                      rows.acc[0][n + 1][2 * half + e] + shift};
  }
};

template <class T, int kDim>
struct Form {
  using Type = Wide<kDim>;
};
template <int kBits, int kDim>
struct Form<QuantisedRow<kBits>, kDim> {
  using Type = Coded<kBits, kDim>;
};

template <class T, int kDim>
constexpr size_t split_shared_bytes() {
  size_t kv = decltype(Form<T, kDim>::Type::kept)::bytes();
  size_t merge = shared_bytes<float2>(kWarps * kRows * kPitch<kDim>) + 2 * shared_bytes<float>(kWarps * kRows);
  return kv > merge ? kv : merge;
}

// This kernel stays whole because its steps share registers and shared memory.
template <class T, int kDim>
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
  typename Form<T, kDim>::Type form(carver);
  const int32_t* table = table_of(args.step, work.seq);
  auto find = [&](int tile) {
    return find_rows(kv, table, kv_head, tile * kTileTokens + warp * kWarpTokens, tokens, lane);
  };

  int tile = tokens.begin / kTileTokens, end_tile = divide_up(tokens.end, kTileTokens);
  uint32_t next_rows = find(tile);
  for (int i = 0; i < form.kAhead; ++i) {
    form.kept.load(tile + i, args.pool, next_rows, warp, lane);
    cp_async_commit();
    next_rows = find(tile + i + 1);  // the block table is read one tile ahead of the copy, to hide its latency
  }

  size_t q_at = (size_t(work.q_token) * size_t(args.n_heads) + size_t(head)) * kDim;
  form.take_q(static_cast<const bf16*>(args.q) + q_at, n_heads, lane);

  float scale = args.scale * kLog2E;
  Rows<kDim, 1> rows;
  rows.clear();
  for (; tile < end_tile; ++tile) {
    cp_async_wait<form.kAhead - 1>();
    __syncwarp();  // this tile has arrived, and no lane reads the tile before
    form.kept.load(tile + form.kAhead, args.pool, next_rows, warp, lane);
    cp_async_commit();
    next_rows = find(tile + form.kAhead + 1);

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
    float total = rows.total(rows.sum, 0, half);
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

template <class T, int kDim>
void run(const CudaAttentionArgs& args, Stream& stream) {
  int n_kv_heads = args.layout.shape.n_kv_heads, chunks = divide_up(args.n_heads / n_kv_heads, kRows);
  Shape shape = {.grid = dim3(unsigned(n_kv_heads * chunks), unsigned(args.step.n_splits)),
                 .block = kThreads,
                 .shared_bytes = split_shared_bytes<T, kDim>()};
  launch(split_mma_kernel<T, kDim>, "split_mma", shape, stream, at_rows(args), rows_of(args), chunks);
}

}  // namespace

void split_mma(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_splits == 0) return;
  for_kv(args, [&]<class T, int kDim>() { run<T, kDim>(args, stream); });
  merge_splits(args, stream);
}

}  // namespace xpyd::attention::cuda_kernels
