// Flash-Decoding (2023): the KV of a sequence is cut into splits with a thread block each, so that few sequences still
// fill the card; merge_splits merges them in order. There is one block per (sequence, split) of the host's list and KV
// head. All query heads of the group share each load of K and V, which cp.async copies a tile ahead. Lesson: decode is
// a stream of KV, but with 8 heads per group its arithmetic on CUDA cores takes as long as the stream. split_mma
// removes that bound.
#include <bit>

#include "attention/cuda/attention_cuda_kernel.h"

namespace xpyd::attention::cuda_kernels {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMaxHeadDim = 256;

template <class T>
constexpr int kTile = 128 / int(sizeof(T));  // tokens
template <class T>
constexpr int kPieceElements = 16 / int(sizeof(T));
// Elements from row to row of K and V in shared memory. A row is padded by 16 bytes, so that lanes that read the same
// piece of 8 rows use different banks.
template <class T>
__host__ __device__ constexpr int pitch(int dim) {
  return dim + kPieceElements<T>;
}

template <class T>
size_t split_shared_bytes(int n_heads, int dim) {
  return shared_bytes<float>(size_t(n_heads * dim)) + shared_bytes<float>(size_t(n_heads * kTile<T>)) +
         shared_bytes<float>(size_t(3 * n_heads)) + shared_bytes<uint32_t>(kSplitTokens) +
         2 * shared_bytes<T>(size_t(2 * kTile<T> * pitch<T>(dim)));
}

__device__ inline void unpack(uint4 w, float (&x)[4], float) {
  x[0] = std::bit_cast<float>(w.x), x[1] = std::bit_cast<float>(w.y);
  x[2] = std::bit_cast<float>(w.z), x[3] = std::bit_cast<float>(w.w);
}
__device__ inline void unpack(uint4 w, float (&x)[8], bf16) {
  uint32_t words[4] = {w.x, w.y, w.z, w.w};
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = std::bit_cast<float>(words[i] << 16);
    x[2 * i + 1] = std::bit_cast<float>(words[i] & 0xffff0000u);
  }
}

// A thread block takes at most kHeads query heads; a larger group takes several blocks. This kernel stays whole because
// its steps share registers and shared memory.
template <class T, int kHeads>
__global__ void split_kv_kernel(const __grid_constant__ CudaAttentionArgs args, const __grid_constant__ KvRows kv,
                                int chunks) {
  // KV heads of a token are adjacent in memory: blocks that run together read whole pages of it.
  int kv_head = int(blockIdx.x) / chunks, chunk = int(blockIdx.x) % chunks;
  int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  SplitWork work = split_work(args, int(blockIdx.y));
  Tokens tokens = work.tokens;
  if (tokens.begin >= tokens.end) return;
  int dim = args.layout.shape.head_dim, group = args.n_heads / args.layout.shape.n_kv_heads;
  int head = kv_head * group + chunk * kHeads;  // the first of this block
  int n_heads = group - chunk * kHeads < kHeads ? group - chunk * kHeads : kHeads;
  constexpr int kTokens = kTile<T>, kPiece = kPieceElements<T>;
  const int row_pitch = pitch<T>(dim);

  Carver carver;
  Shared<float> q = carver.take<float>(kHeads * dim);
  Shared<float> weights = carver.take<float>(kHeads * kTokens);  // [head][token]; scores, then weights
  Shared<float> state = carver.take<float>(3 * kHeads);          // [head]: factor for earlier sums; maximum; sum
  Shared<uint32_t> rows = carver.take<uint32_t>(kSplitTokens);   // rows of K in the pool
  Shared<T> keys = carver.take<T>(2 * kTokens * row_pitch);      // two tiles
  Shared<T> values = carver.take<T>(2 * kTokens * row_pitch);

  const int32_t* table = table_of(args.step, work.seq);
  size_t row_bytes = args.layout.shape.row_bytes(), value_distance = kv.value * row_bytes;
  for (int i = thread; i < kSplitTokens; i += kThreads) {
    int t = work.split * kSplitTokens + i;
    bool readable = t >= tokens.begin && t < tokens.end;
    rows[i] = readable ? kv.row(table, 0, t, kv_head) : 0;
  }
  size_t q_at = (size_t(work.q_token) * size_t(args.n_heads) + size_t(head)) * size_t(dim);
  for (int i = thread; i < kHeads * dim; i += kThreads)
    q[i] = i < n_heads * dim ? get(args.q, args.dtype, q_at + size_t(i)) : 0.0f;
  __syncthreads();

  int pieces = dim / kPiece;
  auto load = [&](int tile) {
    int to = tile % 2 * kTokens * row_pitch;
    for (int i = thread; i < kTokens * pieces; i += kThreads) {
      int r = i / pieces, piece = i % pieces, t = tile * kTokens + r;
      bool readable = t >= tokens.begin && t < tokens.end;
      const std::byte* from = args.pool + rows[t % kSplitTokens] * row_bytes + piece * 16;
      int at = to + r * row_pitch + piece * kPiece;
      cp_async_16(keys, at, from, readable);
      cp_async_16(values, at, from + value_distance, readable);
    }
  };

  // A thread adds values for dims (thread % lanes) and that + 128, for every `owners`-th set of kSet heads.
  constexpr int kSet = kHeads < 4 ? kHeads : 4, kSets = kHeads / kSet;
  int lanes = dim < kThreads ? dim : kThreads, owners = kThreads / lanes, owner = thread / lanes;
  float acc[kSets][kSet][kMaxHeadDim / kThreads] = {};
  constexpr int kWarpHeads = divide_up(kHeads, kWarps);  // heads whose softmax a warp computes: warp, warp + 4
  float max[kWarpHeads], sum[kWarpHeads];
  for (int i = 0; i < kWarpHeads; ++i) max[i] = kNone, sum[i] = 0;
  float scale = args.scale * kLog2E;

  int tile = tokens.begin / kTokens, end_tile = divide_up(tokens.end, kTokens);
  load(tile);
  cp_async_commit();
  for (; tile < end_tile; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and no warp reads the tile before
    if (tile + 1 < end_tile) load(tile + 1);
    cp_async_commit();
    int from = tile % 2 * kTokens * row_pitch, first = tile * kTokens;

    // Scores: a thread has one token and every kParts-th head.
    constexpr int kParts = kThreads / kTokens, kPartHeads = divide_up(kHeads, kParts);
    int r = thread % kTokens, part = thread / kTokens;
    if (part < kHeads) {
      float dot[kPartHeads] = {};
      for (int piece = 0; piece < pieces; ++piece) {
        float x[kPiece];
        unpack(load_16(keys, from + r * row_pitch + piece * kPiece), x, T{});
        for (int i = 0; i < kPartHeads; ++i)
          for (int j = 0; j < kPiece; j += 4) {
            float y[4];
            unpack(load_16(q, (part + i * kParts) * dim + piece * kPiece + j), y, float{});
            for (int e = 0; e < 4; ++e) dot[i] += y[e] * x[j + e];
          }
      }
      bool seen = first + r >= tokens.begin && first + r < tokens.end;
      for (int i = 0; i < kPartHeads; ++i) weights[(part + i * kParts) * kTokens + r] = seen ? dot[i] * scale : kNone;
    }
    __syncthreads();

    for (int i = 0; i < kWarpHeads; ++i) {
      int h = warp + i * kWarps;
      if (h >= kHeads) continue;
      float score[kTokens / 32], top = max[i], added = 0;
      for (int j = 0; j < kTokens / 32; ++j) {
        score[j] = weights[h * kTokens + lane + 32 * j];
        top = fmaxf(top, score[j]);
      }
      top = warp_max(top);
      for (int j = 0; j < kTokens / 32; ++j) {
        float weight = exp2_approx(score[j] - top);
        weights[h * kTokens + lane + 32 * j] = weight;
        added += weight;
      }
      float keep = exp2_approx(max[i] - top);
      sum[i] = sum[i] * keep + warp_sum(added);
      max[i] = top;
      if (lane == 0) state[h] = keep;
    }
    __syncthreads();

    if (owner < owners) {
      for (int i = 0; i < kSets; ++i)
        for (int e = 0; e < kSet; ++e) {
          int set = owner + i * owners;
          float keep = set < kSets ? float(state[set * kSet + e]) : 0.0f;
          for (float& a : acc[i][e]) a *= keep;
        }
      for (int t = 0; t < kTokens; t += 4) {  // values without a token are zeros
        float v[4][kMaxHeadDim / kThreads];
        for (int u = 0; u < 4; ++u)
          for (int j = 0; j < kMaxHeadDim / kThreads; ++j) {
            int d = thread % lanes + kThreads * j;
            v[u][j] = d < dim ? to_float(T(values[from + (t + u) * row_pitch + d])) : 0.0f;
          }
        for (int i = 0; i < kSets; ++i) {
          int set = owner + i * owners;
          if (set >= kSets) continue;
          for (int e = 0; e < kSet; ++e) {
            float w[4];  // for four tokens
            unpack(load_16(weights, (set * kSet + e) * kTokens + t), w, float{});
            for (int u = 0; u < 4; ++u)
              for (int j = 0; j < kMaxHeadDim / kThreads; ++j) acc[i][e][j] += w[u] * v[u][j];
          }
        }
      }
    }
  }

  for (int i = 0; i < kWarpHeads; ++i) {
    int h = warp + i * kWarps;
    if (h < kHeads && lane == 0) state[kHeads + h] = max[i], state[2 * kHeads + h] = sum[i];
  }
  for (int i = 0; i < kSets; ++i)  // stored in the place of q
    for (int e = 0; e < kSet; ++e)
      for (int j = 0; j < kMaxHeadDim / kThreads; ++j) {
        int set = owner + i * owners, d = thread % lanes + kThreads * j;
        if (owner < owners && set < kSets && d < dim) q[(set * kSet + e) * dim + d] = acc[i][e][j];
      }
  __syncthreads();
  for (int i = thread; i < n_heads * dim; i += kThreads) {
    int h = i / dim, d = i % dim;
    if (work.alone) {
      put(args.out, args.dtype, q_at + size_t(i), float(q[i]) / float(state[2 * kHeads + h]));
      continue;
    }
    float* to = partial(args, int(blockIdx.y), head + h);
    to[d] = q[i];
    float* to_state = to + (partial_floats(dim) - 4);
    if (d == 0) to_state[0] = state[kHeads + h], to_state[1] = state[2 * kHeads + h];
  }
}

template <class T, int kHeads>
void run(const CudaAttentionArgs& args, Stream& stream) {
  const KvShape& shape = args.layout.shape;
  int chunks = divide_up(args.n_heads / shape.n_kv_heads, kHeads);
  Shape grid = {.grid = dim3(unsigned(shape.n_kv_heads * chunks), unsigned(args.step.n_splits)),
                .block = kThreads,
                .shared_bytes = split_shared_bytes<T>(kHeads, shape.head_dim)};
  launch(split_kv_kernel<T, kHeads>, "split_kv", grid, stream, at_rows(args), rows_of(args), chunks);
}

}  // namespace

void split_kv(const CudaAttentionArgs& args, Stream& stream) {
  check(args);
  if (args.step.n_splits == 0) return;
  const int group = args.n_heads / args.layout.shape.n_kv_heads;
  for_elements(args, [&]<class T>() {
    if (group == 1) return run<T, 1>(args, stream);
    if (group <= 4) return run<T, 4>(args, stream);
    run<T, 8>(args, stream);
  });
  merge_splits(args, stream);
}

const char* split_kv_refuses(const CudaAttentionArgs& args, const Card& card) {
  int dim = args.layout.shape.head_dim;
  if (dim % 8 != 0) return "needs a head_dim that is a multiple of 8";
  if (dim > kMaxHeadDim) return "needs a head_dim of at most 256";
  const size_t bytes = for_elements(args, [&]<class T>() { return split_shared_bytes<T>(8, dim); });
  return bytes > size_t(card.max_shared_bytes) ? "needs more shared memory than this card has per thread block"
                                               : nullptr;
}

}  // namespace xpyd::attention::cuda_kernels
