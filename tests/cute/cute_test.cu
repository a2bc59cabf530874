// CuTe's layouts are the oracle for what attention kernels take from the PTX ISA: fragments of mma and wgmma, rows of
// ldmatrix, the 128-byte swizzle, and matrix descriptors. The kernels' own code runs on the interpreter over operands
// in CuTe's layout, and its results are read in CuTe's layout. This checks the interpreter, too. A wrong constant makes
// a wrong product.
#include <random>

#include "base/cuda/cuda_kernel_sm90.h"
#include "tests/catch.h"
#include "tests/cuda_arrays.h"
#include "tests/cute/oracle.h"

namespace xpyd::cuda {

// The descriptors with which thread 0 requests products.
struct Asked {
  std::vector<uint64_t> a, b;
} asked;
template <int kBlocks>
void recorded_shared(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulate) {
  if (threadIdx.x == 0) asked.a.push_back(a), asked.b.push_back(b);
  wgmma_shared(d, a, b, accumulate);
}
template <int kBlocks>
void recorded_registers(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b) {
  if (threadIdx.x == 0) asked.b.push_back(b);
  wgmma_registers(d, a, b);
}

}  // namespace xpyd::cuda

#define wgmma_shared recorded_shared
#define wgmma_registers recorded_registers
#define flash_wgmma flash_wgmma_here
#define wgmma_refuses wgmma_refuses_here
#include "attention/cuda/prefill_wgmma_sm90.cu"
#undef wgmma_shared
#undef wgmma_registers

#include "attention/cuda/attention_mma.h"

namespace xpyd::attention::cuda_kernels {
namespace {

namespace cute = cute_oracle;
using cute::At, cute::Matrix;
using testing::to_card;

std::vector<float> numbers(size_t n, unsigned seed) {  // small integers, so that sums are exact
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = float(int(random() % 5) - 2);
  return x;
}
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, int m, int n, int k,
                           bool b_is_kn) {
  std::vector<float> c(size_t(m) * size_t(n));
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int l = 0; l < k; ++l)
        c[size_t(i * n + j)] += a[size_t(i * k + l)] * b[size_t(b_is_kn ? l * n + j : j * k + l)];
  return c;
}
uint32_t pack(float low, float high) { return uint32_t(to_bf16(low).bits) | uint32_t(to_bf16(high).bits) << 16; }

// A matrix as it lies in shared memory.
std::vector<bf16> image(const Matrix& m, const std::vector<float>& x) {
  std::vector<bf16> to(size_t(m.rows * m.columns));
  for (int r = 0; r < m.rows; ++r)
    for (int c = 0; c < m.columns; ++c) to[size_t(cute::element(m, r, c))] = to_bf16(x[size_t(r * m.columns + c)]);
  return to;
}

// The interpreter requires an mbarrier before any other sm_90a operation.
__device__ void begin(Carver& carver) {
  Shared<uint64_t> barrier = carver.take<uint64_t>(1);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 0, 1);
    mbarrier_init_done();
  }
  __syncthreads();
}
__device__ void fill(const Shared<bf16>& to, const bf16* from, int n) {
  for (int i = int(threadIdx.x); i < n / 8; i += int(blockDim.x))
    store_16(to, 8 * i, reinterpret_cast<const uint4*>(from)[i]);
  fence_proxy_async();
  __syncthreads();
}

// --- Scores and values of flash_wgmma, for one warpgroup.

template <int kDim>
__global__ void scores_kernel(const bf16* queries, const bf16* keys, int group, float* out) {
  Carver carver;
  Shared<bf16> q = carver.take<bf16>(Plan<kDim>::kRows * kDim);
  Shared<bf16> tile = carver.take<bf16>(kTile * kDim);
  begin(carver);
  fill(q, queries, Plan<kDim>::kRows * kDim);
  fill(tile, keys, kTile * kDim);
  Computing<kDim> rows;
  rows.clear();
  rows.start_scores(matrix_descriptor(shared_address(q, group * kGroupRows * kBoxColumns)),
                    matrix_descriptor(shared_address(tile, 0)));
  wgmma_wait<0>();
  for (int i = 0; i < kTile / 2; ++i) out[int(threadIdx.x) * (kTile / 2) + i] = rows.s[i / 4][i % 4];
}
template <int kDim>
__global__ void values_kernel(const uint32_t* weights, const bf16* values, float* out) {
  Carver carver;
  Shared<bf16> tile = carver.take<bf16>(kTile * kDim);
  begin(carver);
  fill(tile, values, kTile * kDim);
  Computing<kDim> rows;
  rows.clear();
  for (int i = 0; i < kTile / 4; ++i) rows.p[i / 4][i % 4] = weights[int(threadIdx.x) * (kTile / 4) + i];
  rows.start_values(matrix_descriptor(shared_address(tile, 0), kTile * 128));
  wgmma_wait<0>();
  for (int i = 0; i < kDim / 2; ++i) out[int(threadIdx.x) * (kDim / 2) + i] = rows.acc[i / 4][i % 4];
}

struct Outcome {
  int products = 0, descriptors = 0;  // wrong ones
  std::string faults;                 // of the interpreter
};

int wrong(const Memory& out, const std::vector<float>& want, int n, int threads, auto place) {
  int n_wrong = 0, each = int(want.size()) / threads;
  for (int t = 0; t < threads; ++t)
    for (int i = 0; i < each; ++i) {
      At at = place(t, i);
      n_wrong += out.as<float>()[t * each + i] != want[size_t(at.row * n + at.column)];
    }
  return n_wrong;
}

template <int kDim>
Outcome scores() {
  using P = Plan<kDim>;
  Stream stream;
  Outcome outcome;
  Matrix q{P::kRows, kDim, true}, k{kTile, kDim, true};
  std::vector<float> x = numbers(size_t(q.rows * kDim), 1), y = numbers(size_t(kTile * kDim), 2);
  Memory queries = to_card(image(q, x), stream);
  Memory keys = to_card(image(k, y), stream);
  Memory out = std::move(Memory::device(kGroupRows * kTile * 4).value());
  for (int group = 0; group < P::kGroups; ++group) {
    asked = {};
    simt::FaultCatcher catcher;
    launch(scores_kernel<kDim>, "scores",
           {.block = kGroupThreads, .shared_bytes = size_t(q.rows + kTile) * kDim * 2 + 16}, stream,
           queries.template as<const bf16>(), keys.template as<const bf16>(), group, out.template as<float>());
    stream.wait();
    for (const std::string& fault : catcher.faults()) outcome.faults += fault + "\n";
    std::vector<float> mine(x.begin() + group * kGroupRows * kDim, x.begin() + (group + 1) * kGroupRows * kDim);
    outcome.products += wrong(out, product(mine, y, kGroupRows, kTile, kDim, false), kTile, kGroupThreads,
                              [](int t, int i) { return cute::wgmma_c(kTile, t, i); });
    outcome.descriptors += asked.a.size() != kDim / 16;
    for (int step = 0; step < int(asked.a.size()); ++step) {
      outcome.descriptors += asked.a[size_t(step)] != cute::descriptor(q, 0, group * kGroupRows, kGroupRows, step);
      outcome.descriptors += asked.b[size_t(step)] != cute::descriptor(k, uint32_t(q.rows * kDim * 2), 0, kTile, step);
    }
  }
  return outcome;
}

template <int kDim>
Outcome values() {
  Stream stream;
  Outcome outcome;
  Matrix v{kTile, kDim, false};
  std::vector<float> x = numbers(size_t(kGroupRows * kTile), 3), y = numbers(size_t(kTile * kDim), 4);
  std::vector<uint32_t> p(size_t(kGroupRows * kTile / 2));
  for (int t = 0; t < kGroupThreads; ++t)
    for (int j = 0; j < kTile / 4; ++j) {
      float pair[2];
      for (int e = 0; e < 2; ++e) {
        At at = cute::wgmma_a(t, 2 * (j % 4) + e);
        pair[e] = x[size_t(at.row * kTile + j / 4 * 16 + at.column)];
      }
      p[size_t(t * (kTile / 4) + j)] = pack(pair[0], pair[1]);
    }
  Memory weights = to_card(p, stream), tile = to_card(image(v, y), stream);
  Memory out = std::move(Memory::device(kGroupRows * kDim * 4).value());
  asked = {};
  simt::FaultCatcher catcher;
  launch(values_kernel<kDim>, "values", {.block = kGroupThreads, .shared_bytes = size_t(kTile) * kDim * 2 + 16}, stream,
         weights.template as<const uint32_t>(), tile.template as<const bf16>(), out.template as<float>());
  stream.wait();
  for (const std::string& fault : catcher.faults()) outcome.faults += fault + "\n";
  outcome.products = wrong(out, product(x, y, kGroupRows, kDim, kTile, true), kDim, kGroupThreads,
                           [](int t, int i) { return cute::wgmma_c(kDim, t, i); });
  outcome.descriptors += asked.b.size() != kTile / 16;
  for (int step = 0; step < int(asked.b.size()); ++step) {
    uint64_t want = cute::descriptor(v, 0, 0, kTile, step);
    // With a single box, there is no next box, and the field has no meaning.
    uint64_t unused = kDim == kBoxColumns ? uint64_t(0x3fff) << 16 : 0;
    outcome.descriptors += (asked.b[size_t(step)] & ~unused) != (want & ~unused);
  }
  return outcome;
}

TEST_CASE("cute: flash_wgmma's descriptors, swizzle and fragments are CuTe's", "[cute]") {
  for (Outcome o : {scores<64>(), scores<128>(), values<64>(), values<128>()}) {
    CHECK(o.faults == "");
    CHECK(o.products == 0);
    CHECK(o.descriptors == 0);
  }
}

TEST_CASE("cute: a box lies in shared memory in CuTe's swizzle", "[cute]") {
  for (int row = 0; row < 128; ++row)
    for (int column = 0; column < 128; ++column) {
      int box = (column / 64 * 128 + row) * 64 + ((column / 8 % 8) ^ (row & 7)) * 8 + column % 8;
      if (box != cute::element({128, 128, true}, row, column) || box != cute::element({128, 128, false}, row, column) ||
          swizzled<128>(row, column / 8) + column % 8 != cute::row_major(128, row, column) ||
          (column < 64 && swizzled<64>(row, column / 8) + column % 8 != cute::row_major(64, row, column)))
        FAIL("row " << row << ", column " << column);
    }
  CHECK(cute::element({128, 128, true}, 1, 0) != 64);  // proof that it swizzles
}

// --- Scores and values of flash_mma and split_mma, for one warp.

template <int kDim>
__global__ void warp_kernel(bool of_values, const uint32_t* a, const bf16* tile, float* out) {
  constexpr int kTokens = 32, kOut = kDim / 2;
  Carver carver;
  Shared<bf16> kept = carver.take<bf16>(kTokens * kDim);
  int lane = int(threadIdx.x);
  for (int i = lane; i < kTokens * kDim / 8; i += 32)
    store_16(kept, swizzled<kDim>(i / (kDim / 8), i % (kDim / 8)), reinterpret_cast<const uint4*>(tile)[i]);
  __syncwarp();
  float s[1][kTokens / 8][4] = {};
  if (of_values) {  // `a`: weights in the layout of the scores
    Rows<kDim, 1> rows;
    rows.clear();
    for (int i = 0; i < kTokens / 2; ++i) s[0][i / 4][i % 4] = __uint_as_float(a[lane * (kTokens / 2) + i]);
    rows.template add_values<kTokens>(s, kept, 0, lane);
    for (int i = 0; i < kDim / 2; ++i) out[lane * kOut + i] = rows.acc[0][i / 4][i % 4];
    return;
  }
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t q[1][4];
    for (int j = 0; j < 4; ++j) q[0][j] = a[lane * (kDim / 4) + 4 * k + j];
    add_scores<kDim, 1, kTokens>(s, q, k, kept, 0, lane);
  }
  for (int i = 0; i < kTokens / 2; ++i) out[lane * (kTokens / 2) + i] = s[0][i / 4][i % 4];
}

// Block n of 8 columns in a fragment of 16 x 8 blocks.
At block_at(int lane, int i) {
  At at = cute::mma_c(lane, i % 4);
  return {at.row, at.column + i / 4 * 8};
}

template <int kDim>
int warp_products(bool of_values) {
  constexpr int kTokens = 32;
  Stream stream;
  int k = of_values ? kTokens : kDim, n = of_values ? kDim : kTokens;
  std::vector<float> x = numbers(size_t(16 * k), 5), y = numbers(size_t(kTokens * kDim), 6);
  std::vector<uint32_t> a;
  std::vector<bf16> tile;
  for (float v : y) tile.push_back(to_bf16(v));
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < (of_values ? k / 2 : k / 4); ++i) {
      auto value = [&](At at) { return x[size_t(at.row * k + at.column)]; };
      auto half = [&](int e) {
        At at = cute::mma_a(lane, 2 * (i % 4) + e);
        return value({at.row, at.column + i / 4 * 16});
      };
      a.push_back(of_values ? std::bit_cast<uint32_t>(value(block_at(lane, i))) : pack(half(0), half(1)));
    }
  Memory words = to_card(a, stream), rows = to_card(tile, stream);
  Memory out = std::move(Memory::device(size_t(16 * n) * 4).value());
  launch(warp_kernel<kDim>, "warp", {.block = 32, .shared_bytes = kTokens * kDim * 2}, stream, of_values,
         words.template as<const uint32_t>(), rows.template as<const bf16>(), out.template as<float>());
  stream.wait();
  return wrong(out, product(x, y, 16, n, k, of_values), n, 32, block_at);
}

__global__ void instructions_kernel(const uint32_t* a, const uint32_t* b, float* out, const bf16* matrices,
                                    uint32_t* loaded) {
  Carver carver;
  Shared<bf16> kept = carver.take<bf16>(256);
  int lane = int(threadIdx.x);
  store_16(kept, 8 * lane, reinterpret_cast<const uint4*>(matrices)[lane]);
  __syncwarp();
  uint32_t words[4], r[4];
  for (int j = 0; j < 4; ++j) words[j] = a[4 * lane + j];
  float d[4] = {};
  mma_m16n8k16(d, words, b[2 * lane], b[2 * lane + 1]);
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = d[i];
  ldmatrix_x4(r, kept, 8 * lane);
  for (int j = 0; j < 4; ++j) loaded[4 * lane + j] = r[j];
  ldmatrix_x4_trans(r, kept, 8 * lane);
  for (int j = 0; j < 4; ++j) loaded[128 + 4 * lane + j] = r[j];
}

TEST_CASE("cute: mma's fragments and ldmatrix's rows are CuTe's", "[cute]") {
  Stream stream;
  std::vector<float> x = numbers(16 * 16, 7), y = numbers(8 * 16, 8);
  std::vector<uint32_t> a, b;
  std::vector<bf16> ids(256);
  for (size_t i = 0; i < 256; ++i) ids[i].bits = uint16_t(i);
  for (int lane = 0; lane < 32; ++lane) {
    auto of = [](const std::vector<float>& m, At at) { return m[size_t(at.row * 16 + at.column)]; };
    for (int j = 0; j < 4; ++j) a.push_back(pack(of(x, cute::mma_a(lane, 2 * j)), of(x, cute::mma_a(lane, 2 * j + 1))));
    for (int j = 0; j < 2; ++j) b.push_back(pack(of(y, cute::mma_b(lane, 2 * j)), of(y, cute::mma_b(lane, 2 * j + 1))));
  }
  Memory out = std::move(Memory::device(128 * 4).value()), loaded = std::move(Memory::device(256 * 4).value());
  Memory a_device = to_card(a, stream), b_device = to_card(b, stream), matrices = to_card(ids, stream);
  launch(instructions_kernel, "instructions", {.block = 32, .shared_bytes = 512}, stream, a_device.as<const uint32_t>(),
         b_device.as<const uint32_t>(), out.as<float>(), matrices.as<const bf16>(), loaded.as<uint32_t>());
  stream.wait();
  CHECK(wrong(out, product(x, y, 16, 8, 16, false), 8, 32, cute::mma_c) == 0);
  for (bool transposed : {false, true})
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) {
        uint32_t word = loaded.as<uint32_t>()[128 * transposed + 4 * lane + i / 2];
        REQUIRE(int(word >> i % 2 * 16 & 0xffff) == cute::ldmatrix(transposed, lane, i));
      }
  for (bool of_values : {false, true}) {
    INFO(of_values);
    CHECK(warp_products<64>(of_values) == 0);
    CHECK(warp_products<128>(of_values) == 0);
  }
}

}  // namespace
}  // namespace xpyd::attention::cuda_kernels
