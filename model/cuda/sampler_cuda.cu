// Each round is one launch. Several blocks handle a slice of the row each; the row's last block to finish combines
// them. All sums are integers, so neither slices nor the order of blocks changes a bit.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "base/cuda/cuda_kernel.h"
#include "base/row_hash.h"
#include "model/cuda/sampler_cuda.h"

namespace xpyd::model {
namespace {

using cuda::Carver;
using cuda::Shared;

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxSlices = 16, kSliceTokens = 8192;
constexpr int kBlocks = 4 * 132;  // of all rows together, about: enough to fill a card
constexpr float kOne = 0x1p40f;   // weight of the most likely token; 2^23 of them fit 64 bits
constexpr unsigned kAll = 0xffffffffu;

using Mass = unsigned long long;  // the type that atomicAdd takes

// The float of a cuda::order_key().
__device__ inline float of_key(uint32_t key) {
  return std::bit_cast<float>(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// State of one row between rounds. Between samplings, best, nans and blocks_done are 0.
struct RowState {
  Mass best;              // maximum over slices of (key, lower id), for logits above -infinity
  Mass sums[kMaxSlices];  // mass of each slice's tokens
  float peak;
  int nans;
  unsigned blocks_done;
};

struct Scratch {
  Shared<Mass> masses;  // [kMaxWarps]
  Shared<int> last;     // [1]

  __device__ Scratch() {
    Carver carver;
    masses = carver.take<Mass>(kMaxWarps);
    last = carver.take<int>(1);
  }
};
size_t scratch_bytes() { return cuda::shared_bytes<Mass>(kMaxWarps) + cuda::shared_bytes<int>(1); }

struct Range {  // of ids
  int begin, end;
};

// A row and its draw.
struct Row {
  const float* x;
  int n;
  float peak, scale;

  __device__ float logit(int i) const { return x[i] != x[i] ? -INFINITY : fminf(x[i], FLT_MAX); }
  __device__ uint32_t key(int i) const { return cuda::order_key(logit(i)); }
  __device__ Mass mass(int i) const { return Mass(expf((logit(i) - peak) * scale) * kOne); }
  __device__ Range slice(int s, int n_slices) const {
    const int size = (n + n_slices - 1) / n_slices, begin = s * size < n ? s * size : n;
    return {begin, begin + size < n ? begin + size : n};
  }
};
__device__ inline Row row_of(const CudaSampleArgs& a, const RowState& state, const Draw& how) {
  return {a.logits + size_t(blockIdx.y) * size_t(a.vocab), a.vocab, state.peak, 1 / fmaxf(how.temperature, 1e-6f)};
}

// True for the row's last block of the round, which then sees the other blocks' writes.
__device__ inline bool is_last(RowState& state, const Scratch& s) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last[0] = atomicAdd(&state.blocks_done, 1u) == gridDim.x - 1;
    if (s.last[0]) state.blocks_done = 0;
    __threadfence();
  }
  __syncthreads();
  return s.last[0];
}

// Returns the block's sum to the first thread. It begins with a barrier, as the previous call's readers may be active.
__device__ inline Mass block_sum(Mass sum, const Scratch& s) {
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) s.masses[int(threadIdx.x / kWarp)] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < int(blockDim.x / kWarp); ++w) sum += s.masses[w];
  return sum;
}

// Returns the first id of the range at which the running sum over ascending ids passes `target`. Requires: target is
// below the total. In each pass, every warp sums a piece of the remaining ids, and one piece remains.
template <class Weight>
__device__ inline int walk(Range left, const Scratch& s, Weight weight, Mass target) {
  const int n_warps = int(blockDim.x / kWarp), warp = int(threadIdx.x / kWarp);
  const int lane = int(threadIdx.x % kWarp);
  auto [begin, end] = left;
  Mass before = 0;  // of the ids below `begin`
  while (end - begin > kWarp) {
    const int piece = ((end - begin + n_warps - 1) / n_warps + kWarp - 1) / kWarp * kWarp;
    const int first = begin + warp * piece, last = first + piece < end ? first + piece : end;
    Mass sum = 0;
    for (int i = first + lane; i < last; i += kWarp) sum += weight(i);
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    __syncthreads();
    if (lane == 0) s.masses[warp] = sum;
    __syncthreads();
    int w = 0;
    for (Mass here; w < n_warps - 1 && before + (here = s.masses[w]) <= target; ++w) before += here;
    begin += w * piece;
    end = begin + piece < end ? begin + piece : end;
  }
  Mass upto = begin + lane < end ? weight(begin + lane) : 0;
  for (int step = 1; step < kWarp; step *= 2) {
    const Mass lower = __shfl_up_sync(kAll, upto, step);
    if (lane >= step) upto += lower;
  }
  return begin + __ffs(int(__ballot_sync(kAll, before + upto > target))) - 1;
}

// Finds the highest logit, the lowest id that has it (-infinity and 0 if there is none), and the number of NaN.
__global__ void top_round(CudaSampleArgs a, RowState* states) {
  Scratch s;
  RowState& state = states[blockIdx.y];
  const Row row = row_of(a, state, {});
  const Range slice = row.slice(int(blockIdx.x), int(gridDim.x));
  int nans = 0;
  Mass best = 0;
  for (int i = slice.begin + int(threadIdx.x); i < slice.end; i += int(blockDim.x)) {
    nans += row.x[i] != row.x[i];
    if (row.logit(i) > -INFINITY) best = max(best, Mass(row.key(i)) << 32 | (kAll - unsigned(i)));
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    best = max(best, __shfl_xor_sync(kAll, best, step));
    nans += __shfl_xor_sync(kAll, nans, step);
  }
  if (threadIdx.x % kWarp == 0) {
    atomicMax(&state.best, best);
    if (nans > 0) atomicAdd(&state.nans, nans);
  }
  if (!is_last(state, s) || threadIdx.x != 0) return;
  best = __ldcg(&state.best);
  state.peak = best > 0 ? of_key(uint32_t(best >> 32)) : -INFINITY;
  a.tokens[blockIdx.y] = best > 0 ? int(kAll - uint32_t(best)) : 0;
  a.nans[blockIdx.y] = __ldcg(&state.nans);
  state.best = 0;
  state.nans = 0;
}

// Finds the token at which the running sum over ascending ids passes the draw.
__global__ void draw_round(CudaSampleArgs a, RowState* states) {
  Scratch s;
  RowState& state = states[blockIdx.y];
  const Draw how = a.rows[blockIdx.y];
  const Row row = row_of(a, state, how);
  if (how.temperature <= 0 || row.peak == -INFINITY) return;
  const Range mine = row.slice(int(blockIdx.x), int(gridDim.x));
  Mass sum = 0;
  for (int i = mine.begin + int(threadIdx.x); i < mine.end; i += int(blockDim.x)) sum += row.mass(i);
  sum = block_sum(sum, s);
  if (threadIdx.x == 0) state.sums[blockIdx.x] = sum;
  if (!is_last(state, s)) return;

  Mass all = 0, before = 0;
  for (int i = 0; i < int(gridDim.x); ++i) all += __ldcg(&state.sums[i]);
  const Mass place = Mass(double(how.uniform) * double(all)), target = place < all ? place : all - 1;
  int at = 0;
  for (Mass here; before + (here = __ldcg(&state.sums[at])) <= target; ++at) before += here;
  auto mass = [&](int i) { return row.mass(i); };
  const int token = walk(row.slice(at, int(gridDim.x)), s, mass, target - before);
  if (threadIdx.x == 0) a.tokens[blockIdx.y] = token;
}

}  // namespace

size_t cuda_sample_workspace(int max_n) { return size_t(max_n) * sizeof(RowState); }

void cuda_sample(const CudaSampleArgs& a, cuda::Stream& stream) {
  XPYD_CHECK(a.vocab < 1 << 23);
  if (a.n == 0) return;
  const int n_slices = a.n_slices > 0 ? std::min(a.n_slices, kMaxSlices)
                                      : std::clamp(std::min((a.vocab + kSliceTokens - 1) / kSliceTokens, kBlocks / a.n),
                                                   1, kMaxSlices);
  const int of_slice = (a.vocab + n_slices - 1) / n_slices;
  // walk() needs at least two warps to shrink its range.
  const int threads = std::clamp((of_slice / 4 + kWarp - 1) / kWarp * kWarp, 2 * kWarp, kMaxWarps * kWarp);
  const cuda::Shape shape{dim3(unsigned(n_slices), unsigned(a.n)), dim3(unsigned(threads)), scratch_bytes()};
  auto* states = static_cast<RowState*>(a.workspace);
  cuda::launch(top_round, "sample_top", shape, stream, a, states);
  if (a.rows) cuda::launch(draw_round, "sample_draw", shape, stream, a, states);
}

namespace {

constexpr int kHashThreads = 256;
constexpr int kHashTerms = 8;  // per thread

// Several blocks per row, so that a batch of one does not wait for one SM to read 512 KB. The sum does not depend on
// the order of its terms.
__global__ void hash_rows_kernel(const float* logits, int vocab, Mass* out) {
  const float* row = logits + size_t(blockIdx.y) * size_t(vocab);
  const size_t n = n_row_hash_terms(size_t(vocab));
  size_t i = blockIdx.x * size_t(kHashThreads * kHashTerms) + threadIdx.x;
  Mass sum = 0;
  for (int term = 0; term < kHashTerms; ++term, i += kHashThreads)
    if (i < n) sum += row_hash_term(row, size_t(vocab), i);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&out[blockIdx.y], sum);
}

}  // namespace

void hash_rows(const float* logits, int n_rows, int vocab, uint64_t* out, cuda::Stream& stream) {
  XPYD_CHECK(n_rows >= 0 && n_rows < 1 << 16 && vocab > 0);
  if (n_rows == 0) return;
  static_assert(sizeof(Mass) == sizeof(uint64_t));
  cuda::fill(out, 0, size_t(n_rows) * sizeof(uint64_t), stream);
  const size_t of_block = size_t(kHashThreads * kHashTerms);
  const size_t blocks = (n_row_hash_terms(size_t(vocab)) + of_block - 1) / of_block;
  cuda::launch(hash_rows_kernel, "hash_rows", cuda::Shape{dim3(unsigned(blocks), unsigned(n_rows)), dim3(kHashThreads)},
               stream, logits, vocab, reinterpret_cast<Mass*>(out));
}

}  // namespace xpyd::model
