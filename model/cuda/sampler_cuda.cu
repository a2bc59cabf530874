// A filter is a cut in the order (logit, then lower id). Top-k and top-p find it by counting in a radix of the float's
// bits, as on the CPU; nothing is sorted. Each round is one launch. Several blocks handle a slice of the row each; the
// row's last block to finish combines them and sets up the next round. All sums are integers, so neither slices nor the
// order of blocks changes a bit.
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
constexpr int kDigits = 256, kCopies = 4;
constexpr int kMaxSlices = 16, kSliceTokens = 8192;
constexpr int kBlocks = 4 * 132;  // of all rows together, about: enough to fill a card
constexpr float kOne = 0x1p40f;   // weight of the most likely token; 2^23 of them fit 64 bits
constexpr unsigned kAll = 0xffffffffu;

using Mass = unsigned long long;  // the type that atomicAdd takes

// Keys whose unsigned order is the order of the floats; no NaN; -0 and +0 are equal.
__device__ inline uint32_t order_key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x == 0 ? 0.0f : x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float of_key(uint32_t key) {
  return std::bit_cast<float>(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// The heaviest tokens: those above `key`, and the `ties` lowest ids at `key`.
struct Cut {
  uint32_t key;  // 0, which no logit has: all tokens
  int ties;
};

// State of one row between rounds. Between samplings, best, nans, digits and blocks_done are 0.
struct RowState {
  Mass best;  // maximum over slices of (key, lower id), for logits above -infinity
  Mass digits[kDigits];
  Mass sums[kMaxSlices];  // mass of each slice's tokens above the cut
  int ties[kMaxSlices];   // each slice's tokens at the cut
  Mass target, above;     // mass of the cut that is sought; mass above `prefix`
  uint32_t prefix;        // the known digits of the cut's key
  Cut cut;
  float peak;
  int nans;
  unsigned blocks_done;
};

struct Scratch {
  Shared<Mass> masses;     // [kMaxWarps]
  Shared<uint32_t> parts;  // [2, kDigits, kCopies]: low words, high words
  Shared<Mass> digits;     // [kDigits]
  Shared<int> last;        // [1]

  __device__ Scratch() {
    Carver carver;
    masses = carver.take<Mass>(kMaxWarps);
    parts = carver.take<uint32_t>(2 * kDigits * kCopies);
    digits = carver.take<Mass>(kDigits);
    last = carver.take<int>(1);
  }
  // Adds a weight to a digit. Shared memory has fast 32-bit atomics only, so the carry is done here. Copies of a digit
  // spread lanes that meet at it, as most do at the first digit.
  __device__ void add(int digit, Mass weight) const {
    const int at = digit * kCopies + int(threadIdx.x) % kCopies;
    const uint32_t low = uint32_t(weight), before = atomicAdd(&parts[at], low);
    const uint32_t high = uint32_t(weight >> 32) + uint32_t(before + low < before);
    if (high > 0) atomicAdd(&parts[kDigits * kCopies + at], high);
  }
};
size_t scratch_bytes() {
  return cuda::shared_bytes<Mass>(kMaxWarps) + cuda::shared_bytes<uint32_t>(2 * kDigits * kCopies) +
         cuda::shared_bytes<Mass>(kDigits) + cuda::shared_bytes<int>(1);
}

struct Range {  // of ids
  int begin, end;
};

// A row, its draw, and the tokens that are left of it.
struct Row {
  const float* x;
  int n;
  float peak, scale;
  Cut cut;
  float least;  // least weight that is kept

  __device__ float logit(int i) const { return x[i] != x[i] ? -INFINITY : fminf(x[i], FLT_MAX); }
  __device__ uint32_t key(int i) const { return order_key(logit(i)); }
  __device__ Mass mass(float logit) const {
    const float weight = expf((logit - peak) * scale);
    return weight >= least ? Mass(weight * kOne) : 0;
  }
  __device__ Mass mass_at(uint32_t key) const { return key > 0 ? mass(of_key(key)) : 0; }
  __device__ Mass mass_above(int i) const { return key(i) > cut.key ? mass(logit(i)) : 0; }
  __device__ Range slice(int s, int n_slices) const {
    const int size = (n + n_slices - 1) / n_slices, begin = s * size < n ? s * size : n;
    return {begin, begin + size < n ? begin + size : n};
  }
};
__device__ inline Row row_of(const CudaSampleArgs& a, const RowState& state, const Draw& how) {
  return {a.logits + size_t(blockIdx.y) * size_t(a.vocab),
          a.vocab,
          state.peak,
          1 / fmaxf(how.temperature, 1e-6f),
          state.cut,
          0};
}
__device__ inline bool draws(const Draw& how, float peak) {
  return how.temperature > 0 && how.top_k != 1 && peak > -INFINITY;
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
  state.cut = {0, 0};
  a.tokens[blockIdx.y] = best > 0 ? int(kAll - uint32_t(best)) : 0;
  a.nans[blockIdx.y] = __ldcg(&state.nans);
  state.best = 0;
  state.nans = 0;
}

// Finds one more digit, at `shift`, of the key at which the heaviest tokens reach the target. The target is top_k
// tokens, or the share top_p of the mass that the cut has left. The last digit gives the new cut.
__global__ void digit_round(CudaSampleArgs a, RowState* states, bool by_mass, int shift) {
  Scratch s;
  RowState& state = states[blockIdx.y];
  const Draw how = a.rows[blockIdx.y];
  const Row row = row_of(a, state, how);
  if (!draws(how, row.peak) || (by_mass ? how.top_p >= 1 : how.top_k <= 0 || how.top_k >= row.n)) return;
  const bool first = shift == 24;
  const uint32_t mask = first ? 0 : kAll << (shift + 8), prefix = state.prefix & mask;
  const Mass above = first ? 0 : state.above, known_target = state.target;
  for (int d = int(threadIdx.x); d < 2 * kDigits * kCopies; d += int(blockDim.x)) s.parts[d] = 0;
  __syncthreads();
  const Range slice = row.slice(int(blockIdx.x), int(gridDim.x));
  for (int i = slice.begin + int(threadIdx.x); i < slice.end; i += int(blockDim.x)) {
    const uint32_t key = row.key(i);
    if ((key & mask) != prefix) continue;
    const Mass w = by_mass ? row.mass_above(i) : 1;
    if (w > 0) s.add(int(key >> shift & (kDigits - 1)), w);
  }
  __syncthreads();
  for (int d = int(threadIdx.x); d < kDigits; d += int(blockDim.x)) {
    Mass sum = 0;
    for (int copy = 0; copy < kCopies; ++copy) {
      const uint32_t low = s.parts[d * kCopies + copy];
      const uint32_t high = s.parts[(kDigits + d) * kCopies + copy];
      sum += Mass(high) << 32 | low;
    }
    if (sum > 0) atomicAdd(&state.digits[d], sum);
  }
  if (!is_last(state, s)) return;

  for (int d = int(threadIdx.x); d < kDigits; d += int(blockDim.x)) {
    Mass sum = __ldcg(&state.digits[d]);
    state.digits[d] = 0;
    // adds the ties that top-k has kept
    if (by_mass && (row.cut.key & mask) == prefix && int(row.cut.key >> shift & (kDigits - 1)) == d)
      sum += Mass(row.cut.ties) * row.mass_at(row.cut.key);
    s.digits[d] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  constexpr int kMine = kDigits / kWarp;  // lane l holds the l-th highest digits
  const int lane = int(threadIdx.x);
  Mass mine = 0;
  for (int i = 0; i < kMine; ++i) mine += s.digits[kDigits - 1 - lane * kMine - i];
  Mass upto = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const Mass higher = __shfl_up_sync(kAll, upto, step);
    if (lane >= step) upto += higher;
  }
  const Mass all = __shfl_sync(kAll, upto, kWarp - 1);
  Mass target = known_target;
  if (first) {
    const Mass part = by_mass ? Mass(ceil(double(how.top_p) * double(all))) : Mass(how.top_k);
    target = part < 1 ? 1 : part < all ? part : all;
  }
  Mass sum = above + upto - mine;
  if (sum >= target || above + upto < target) return;  // one lane remains
  int digit = kDigits - 1 - lane * kMine;
  for (Mass here; sum + (here = s.digits[digit]) < target; --digit) sum += here;
  state.prefix = prefix | uint32_t(digit) << shift;
  state.above = sum;
  state.target = target;
  if (shift > 0) return;
  // Tokens at the cut weigh the same; the lowest ids fill the rest of the target.
  const Mass each = by_mass ? row.mass_at(state.prefix) : 1;
  state.cut = {state.prefix, int((target - sum + each - 1) / each)};
}

// Finds the token at which the running sum over the remaining ids passes the draw.
__global__ void draw_round(CudaSampleArgs a, RowState* states) {
  Scratch s;
  RowState& state = states[blockIdx.y];
  const Draw how = a.rows[blockIdx.y];
  Row row = row_of(a, state, how);
  if (!draws(how, row.peak)) return;
  row.least = how.min_p;
  const Range mine = row.slice(int(blockIdx.x), int(gridDim.x));
  Mass sum = 0, n_ties = 0;
  for (int i = mine.begin + int(threadIdx.x); i < mine.end; i += int(blockDim.x)) {
    sum += row.mass_above(i);
    n_ties += row.key(i) == row.cut.key;
  }
  sum = block_sum(sum, s);
  n_ties = block_sum(n_ties, s);
  if (threadIdx.x == 0) {
    state.sums[blockIdx.x] = sum;
    state.ties[blockIdx.x] = int(n_ties);
  }
  if (!is_last(state, s)) return;

  const Mass each = row.mass_at(row.cut.key);
  int left = row.cut.ties,
      here = 0;  // remaining kept ties, for slice `at` and later; kept ties of slice `at`
  auto kept_in = [&](int slice) {
    const int there = __ldcg(&state.ties[slice]);
    here = left < there ? left : there;
    return __ldcg(&state.sums[slice]) + Mass(here) * each;
  };
  Mass all = 0, before = 0;
  for (int i = 0; i < int(gridDim.x); ++i) all += kept_in(i), left -= here;
  const Mass place = Mass(double(how.uniform) * double(all)), target = place < all ? place : all - 1;
  int at = 0;
  left = row.cut.ties;
  for (Mass sums; before + (sums = kept_in(at)) <= target; ++at) before += sums, left -= here;
  const Range slice = row.slice(at, int(gridDim.x));
  auto tie = [&](int i) -> Mass { return row.key(i) == row.cut.key; };
  const int last_tie = here > 0 ? walk(slice, s, tie, Mass(here - 1)) : -1;
  auto mass = [&](int i) { return row.mass_above(i) + (i <= last_tie ? tie(i) * each : 0); };
  const int token = walk(slice, s, mass, target - before);
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
  if (!a.rows) return;
  for (bool by_mass : {false, true})
    for (int shift = 24; (by_mass ? a.any_top_p : a.any_top_k) && shift >= 0; shift -= 8)
      cuda::launch(digit_round, by_mass ? "sample_top_p" : "sample_top_k", shape, stream, a, states, by_mass, shift);
  cuda::launch(draw_round, "sample_draw", shape, stream, a, states);
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
