// One block per row. Filters are one cut in the order (logit, then lower id): top-k and top-p each
// find where it lies by counting in a radix of the float's bits, as on the CPU; nothing is sorted
// or stored.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "base/cuda_kernel.h"
#include "model/sampler_cuda.h"

namespace xpyd {
namespace {

using cuda::Carver;
using cuda::Shared;

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int kDigits = 256, kCopies = 4;
constexpr float kOne = 0x1p40f;  // the most likely token's weight; 2^23 of them fit 64 bits
constexpr unsigned kAll = 0xffffffffu;

using Mass = unsigned long long;

// Unsigned order of these keys = order of the floats; no NaN; -0 and +0 are one.
__device__ inline uint32_t order_key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x == 0 ? 0.0f : x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

struct Scratch {
  Shared<float> values;    // [kMaxWarps]
  Shared<int> ids;         // [kMaxWarps]
  Shared<Mass> masses;     // [kMaxWarps]
  Shared<uint32_t> parts;  // [2, kDigits, kCopies]: low words, high words
  Shared<Mass> digits;     // [kDigits]
  Shared<Mass> found;      // [2]

  // Shared memory adds 32 bits at once, and 64 in a loop of attempts; so the carry is ours. Lanes
  // that meet at a digit, as most do at the first, are spread over copies of it.
  __device__ void add(int digit, Mass weight) const {
    const int at = digit * kCopies + int(threadIdx.x) % kCopies;
    const uint32_t low = uint32_t(weight), before = atomicAdd(&parts[at], low);
    const uint32_t high = uint32_t(weight >> 32) + uint32_t(before + low < before);
    if (high > 0) atomicAdd(&parts[kDigits * kCopies + at], high);
  }
};
size_t scratch_bytes() {
  return cuda::shared_bytes<float>(kMaxWarps) + cuda::shared_bytes<int>(kMaxWarps) +
         cuda::shared_bytes<Mass>(kMaxWarps) + cuda::shared_bytes<uint32_t>(2 * kDigits * kCopies) +
         cuda::shared_bytes<Mass>(kDigits) + cuda::shared_bytes<Mass>(2);
}

// A row and what is left of it: tokens above the cut, and at its key those up to its id.
struct Row {
  const float* x;
  int n;
  float peak, scale;
  uint32_t cut_key;
  int cut_id;
  float least;  // weight

  __device__ float logit(int i) const { return x[i] != x[i] ? -INFINITY : fminf(x[i], FLT_MAX); }
  __device__ uint32_t key(int i) const { return order_key(logit(i)); }
  __device__ bool kept(int i) const {
    const uint32_t k = key(i);
    return k > cut_key || (k == cut_key && i <= cut_id);
  }
  __device__ Mass mass(int i) const {
    const float weight = expf((logit(i) - peak) * scale);
    return kept(i) && weight >= least ? Mass(weight * kOne) : 0;
  }
};

__device__ inline bool better(float value, int id, float than, int than_id) {
  return value > than || (value == than && id < than_id);
}

// The highest logit and the lowest id that has it (-infinity, 0 where there is none), and the NaN.
__device__ inline int find_top(const Row& row, const Scratch& s, float& value, int& id) {
  int nans = 0;
  value = -INFINITY;
  id = 0;
  for (int i = int(threadIdx.x); i < row.n; i += int(blockDim.x)) {
    nans += row.x[i] != row.x[i];
    const float x = row.logit(i);
    if (x > value) value = x, id = i;  // ids ascend
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAll, value, step);
    const int other_id = __shfl_xor_sync(kAll, id, step);
    if (other > -INFINITY && (value == -INFINITY || better(other, other_id, value, id)))
      value = other, id = other_id;
    nans += __shfl_xor_sync(kAll, nans, step);
  }
  if (threadIdx.x % kWarp == 0) {
    const int warp = int(threadIdx.x / kWarp);
    s.values[warp] = value;
    s.ids[warp] = id;
    s.masses[warp] = Mass(nans);
  }
  __syncthreads();
  nans = 0;
  value = -INFINITY;
  id = 0;
  for (int w = 0; w < int(blockDim.x / kWarp); ++w) {
    const float other = s.values[w];
    const int other_id = s.ids[w];
    nans += int(Mass(s.masses[w]));
    if (other > -INFINITY && (value == -INFINITY || better(other, other_id, value, id)))
      value = other, id = other_id;
  }
  __syncthreads();
  return nans;
}

template <class Weight>
__device__ inline Mass total(int n, const Scratch& s, Weight weight) {
  Mass sum = 0;
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) sum += weight(i);
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  if (threadIdx.x % kWarp == 0) s.masses[int(threadIdx.x / kWarp)] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < int(blockDim.x / kWarp); ++w) sum += s.masses[w];
  __syncthreads();
  return sum;
}

// The first id at which the running sum over ascending ids passes `target`, which is below the
// total: again and again, every warp sums a piece of the ids that are left, and one piece remains.
template <class Weight>
__device__ inline int walk(int n, const Scratch& s, Weight weight, Mass target) {
  const int n_warps = int(blockDim.x / kWarp), warp = int(threadIdx.x / kWarp);
  const int lane = int(threadIdx.x % kWarp);
  int begin = 0, end = n;
  Mass before = 0;  // of the ids below `begin`
  while (end - begin > kWarp) {
    const int piece = ((end - begin + n_warps - 1) / n_warps + kWarp - 1) / kWarp * kWarp;
    const int first = begin + warp * piece, last = first + piece < end ? first + piece : end;
    Mass sum = 0;
    for (int i = first + lane; i < last; i += kWarp) sum += weight(i);
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (lane == 0) s.masses[warp] = sum;
    __syncthreads();
    int w = 0;
    for (Mass here; w < n_warps - 1 && before + (here = s.masses[w]) <= target; ++w) before += here;
    __syncthreads();
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

// Lowers row's cut to the heaviest tokens that together weigh at least `target` (> 0, at most the
// total).
template <class Weight>
__device__ inline void cut(Row& row, const Scratch& s, Weight weight, Mass target) {
  uint32_t prefix = 0, mask = 0;
  Mass above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int d = int(threadIdx.x); d < 2 * kDigits * kCopies; d += int(blockDim.x)) s.parts[d] = 0;
    __syncthreads();
    for (int i = int(threadIdx.x); i < row.n; i += int(blockDim.x)) {
      const uint32_t key = row.key(i);
      if ((key & mask) != prefix) continue;
      const Mass w = weight(i);
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
      s.digits[d] = sum;
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {  // lane l: the l-th highest digits
      constexpr int kMine = kDigits / kWarp;
      const int lane = int(threadIdx.x);
      Mass mine = 0;
      for (int i = 0; i < kMine; ++i) mine += s.digits[kDigits - 1 - lane * kMine - i];
      Mass upto = mine;
      for (int step = 1; step < kWarp; step *= 2) {
        const Mass higher = __shfl_up_sync(kAll, upto, step);
        if (lane >= step) upto += higher;
      }
      Mass sum = above + upto - mine;
      if (sum < target && above + upto >= target) {
        int digit = kDigits - 1 - lane * kMine;
        for (Mass here; sum + (here = s.digits[digit]) < target; --digit) sum += here;
        s.found[0] = Mass(digit);
        s.found[1] = sum;
      }
    }
    __syncthreads();
    prefix |= uint32_t(Mass(s.found[0])) << shift;
    mask |= uint32_t(kDigits - 1) << shift;
    above = s.found[1];
    __syncthreads();
  }
  // Those at the cut weigh the same: the lowest ids fill what is missing.
  auto at_cut = [&](int i) -> Mass { return row.key(i) == prefix ? weight(i) : 0; };
  row.cut_id = walk(row.n, s, at_cut, target - above - 1);
  row.cut_key = prefix;
}

__global__ void sample_kernel(CudaSampleArgs a) {
  Carver carver;
  Scratch s;
  s.values = carver.take<float>(kMaxWarps);
  s.ids = carver.take<int>(kMaxWarps);
  s.masses = carver.take<Mass>(kMaxWarps);
  s.parts = carver.take<uint32_t>(2 * kDigits * kCopies);
  s.digits = carver.take<Mass>(kDigits);
  s.found = carver.take<Mass>(2);
  Row row{a.logits + size_t(blockIdx.x) * size_t(a.vocab), a.vocab, 0, 0, 0, a.vocab, 0};
  int token = 0;
  const int nans = find_top(row, s, row.peak, token);
  const Draw how = a.rows ? a.rows[blockIdx.x] : Draw{};
  if (how.temperature > 0 && how.top_k != 1 && row.peak > -INFINITY) {
    row.scale = 1 / fmaxf(how.temperature, 1e-6f);
    if (how.top_k > 0 && how.top_k < row.n)
      cut(
          row, s, [](int) -> Mass { return 1; }, Mass(how.top_k));
    auto mass = [&row](int i) { return row.mass(i); };
    if (how.top_p < 1) {
      const Mass all = total(row.n, s, mass), part = Mass(ceil(double(how.top_p) * double(all)));
      const Row before = row;
      cut(
          row, s, [&before](int i) { return before.mass(i); },
          part < 1     ? 1
          : part < all ? part
                       : all);
    }
    row.least = how.min_p;
    const Mass all = total(row.n, s, mass), place = Mass(double(how.uniform) * double(all));
    token = walk(row.n, s, mass, place < all ? place : all - 1);
  }
  if (threadIdx.x != 0) return;
  a.tokens[blockIdx.x] = token;
  a.nans[blockIdx.x] = nans;
}

}  // namespace

void cuda_sample(const CudaSampleArgs& a, cuda::Stream& stream) {
  XPYD_CHECK(a.vocab < 1 << 23);
  if (a.n == 0) return;
  // Two warps at least: walk() halves.
  const int threads =
      std::clamp((a.vocab / 4 + kWarp - 1) / kWarp * kWarp, 2 * kWarp, kMaxWarps * kWarp);
  cuda::launch(sample_kernel, "sample",
               cuda::Shape{dim3(unsigned(a.n)), dim3(unsigned(threads)), scratch_bytes()}, stream,
               a);
}

}  // namespace xpyd
