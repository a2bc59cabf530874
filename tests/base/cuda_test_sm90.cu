// The features that the kernels for sm_90a build on, one at a time, checked in the same way on a card and on the
// interpreter: the places where bulk copies put their bytes, and products of a warpgroup on them.
#include <vector>

#include "base/cuda/cuda_kernel_sm90.h"
#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::cuda {
namespace {

constexpr int kRow = kBoxColumns;  // elements of a row of a tile, 128 bytes

template <class T>
Memory to_card(const std::vector<T>& from, Stream& stream) {
  Memory host = Memory::pinned(from.size() * sizeof(T));
  std::copy(from.begin(), from.end(), host.as<T>());
  Memory memory = Memory::device(host.size()).value();
  copy(memory.data(), host.data(), host.size(), stream);
  stream.wait();
  return memory;
}
template <class T>
std::vector<T> from_card(const Memory& from, Stream& stream) {
  Memory host = Memory::pinned(from.size());
  copy(host.data(), from.data(), from.size(), stream);
  stream.wait();
  return {host.as<T>(), host.as<T>() + from.size() / sizeof(T)};
}
bool has_sm90() {
  const Card card = open().value();
  return card.major == 9 && card.minor == 0;
}

// --- Copies.

constexpr int kBoxRows = 24;

__global__ void copy_one_box(const __grid_constant__ TensorMap map, int column, int row, uint4* out) {
  Carver carver;
  Shared<bf16> tile = carver.take<bf16>(kBoxRows * kRow);
  Shared<uint64_t> barriers = carver.take<uint64_t>(1);
  if (threadIdx.x == 0) {
    mbarrier_init(barriers, 0, 1);
    mbarrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(barriers, 0, kBoxRows * kRow * 2);
    copy_box(tile, 0, map, column, row, barriers, 0);
  }
  mbarrier_wait(barriers, 0, 0);
  for (int i = int(threadIdx.x); i < kBoxRows * 8; i += int(blockDim.x)) out[i] = load_16(tile, 8 * i);
}

TEST_CASE("cuda sm90: a copied box is swizzled, and elements outside the matrix are zeros", "[cuda][sm90]") {
  if (!has_sm90()) SKIP_TEST("needs sm_90");
  constexpr int kRows = 50, kColumns = 96, kStride = 104;
  Stream stream;
  std::vector<uint16_t> matrix(kRows * kStride);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = uint16_t(i + 1);
  const Memory data = to_card(matrix, stream);
  const TensorMap map = make_tensor_map(
      {.data = data.data(), .rows = kRows, .columns = kColumns, .row_stride = 2 * kStride, .box_rows = kBoxRows});
  for (auto [column, row] : {std::pair{0, 0}, {0, 8}, {32, 0}, {64, 40}, {0, -5}, {0, kRows}, {kColumns, 3}}) {
    CAPTURE(column, row);
    const Memory out = Memory::device(kBoxRows * kRow * 2).value();
    launch(copy_one_box, "copy_one_box",
           {.grid = 1, .block = 64, .shared_bytes = shared_bytes<bf16>(kBoxRows * kRow) + shared_bytes<uint64_t>(1)},
           stream, map, column, row, out.as<uint4>());
    const std::vector<uint16_t> got = from_card<uint16_t>(out, stream);
    int wrong = 0;
    for (int r = 0; r < kBoxRows; ++r)
      for (int c = 0; c < kRow; ++c) {
        const int from_row = row + r, from_column = column + c;
        const bool inside = from_row >= 0 && from_row < kRows && from_column < kColumns;
        const uint16_t want = inside ? matrix[size_t(from_row * kStride + from_column)] : 0;
        wrong += got[size_t(r * kRow + (c / 8 ^ r % 8) * 8 + c % 8)] != want;
      }
    CHECK(wrong == 0);
  }
}

// --- Products. a[64, 64], b[128, 64], v[64, 128] as two halves of 64 columns.

constexpr int kM = 64, kK = 64, kN = 128;

// One warpgroup computes a b^T and then a v, [64, 128] each, and then a v[:, 64 to 127] by the instruction of 64
// columns. If `stored`, the threads' own stores bring a to shared memory.
__global__ void multiply(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const __grid_constant__ TensorMap v_map, const bf16* a, float* out, bool stored) {
  Carver carver;
  Shared<bf16> a_tile = carver.take<bf16>(kM * kRow), b_tile = carver.take<bf16>(kN * kRow),
               v_tiles = carver.take<bf16>(2 * kK * kRow);
  Shared<uint64_t> barriers = carver.take<uint64_t>(1);
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    mbarrier_init(barriers, 0, 1);
    mbarrier_init_done();
  }
  __syncthreads();
  if (thread == 0) {
    mbarrier_expect(barriers, 0, 2 * kRow * ((stored ? 0 : kM) + kN + 2 * kK));
    if (!stored) copy_box(a_tile, 0, a_map, 0, 0, barriers, 0);
    copy_box(b_tile, 0, b_map, 0, 0, barriers, 0);
    copy_box(v_tiles, 0, v_map, 0, 0, barriers, 0);
    copy_box(v_tiles, kK * kRow, v_map, kRow, 0, barriers, 0);
  }
  if (stored) {
    for (int i = thread; i < kM * 8; i += 128)
      store_16(a_tile, (i / 8) * kRow + (i % 8 ^ i / 8 % 8) * 8, *reinterpret_cast<const uint4*>(a + 8 * i));
    fence_proxy_async();
    __syncthreads();
  }
  mbarrier_wait(barriers, 0, 0);

  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);  // of d[n][0], and 8 n columns more
  auto write = [&]<int kBlocks>(const float(&d)[kBlocks][4], float* to) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) to[(row + c / 2 * 8) * 8 * kBlocks + 8 * n + column + c % 2] = d[n][c];
  };
  const uint64_t a_matrix = matrix_descriptor(shared_address(a_tile, 0)),
                 b_matrix = matrix_descriptor(shared_address(b_tile, 0)),
                 v_matrix = matrix_descriptor(shared_address(v_tiles, 0), kK * kRow * 2),
                 v_half = matrix_descriptor(shared_address(v_tiles, kK * kRow));
  float s[16][4] = {};
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) wgmma_shared(s, advance(a_matrix, 32 * k), advance(b_matrix, 32 * k), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  keep_operands(s);
  write(s, out);

  uint32_t p[kK / 16][4];
#pragma unroll
  for (int k = 0; k < kK / 16; ++k)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      p[k][j] = *reinterpret_cast<const uint32_t*>(a + (row + j % 2 * 8) * kK + 16 * k + column + j / 2 * 8);
  float whole[16][4] = {}, half[8][4] = {};
  keep_operands(whole);
  keep_operands(half);
  keep_operands(p);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    wgmma_registers(whole, p[k], advance(v_matrix, k * 16 * kRow * 2));
    wgmma_registers(half, p[k], advance(v_half, k * 16 * kRow * 2));
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep_operands(whole);
  keep_operands(half);
  write(whole, out + kM * kN);
  write(half, out + 2 * kM * kN);
}

TEST_CASE("cuda sm90: products of a warpgroup are right in every element", "[cuda][sm90]") {
  if (!has_sm90()) SKIP_TEST("needs sm_90");
  Stream stream;
  Random random(9);
  // Products of small integers are exact in any order of addition.
  auto integers = [&](int n) {
    std::vector<bf16> values(static_cast<size_t>(n));
    for (bf16& x : values) x = to_bf16(float(int(random.below(17)) - 8));
    return values;
  };
  const std::vector<bf16> a = integers(kM * kK), b = integers(kN * kK), v = integers(kK * kN);
  const Memory on_a = to_card(a, stream), on_b = to_card(b, stream), on_v = to_card(v, stream);
  auto map_of = [](const Memory& data, int rows, int columns) {
    return make_tensor_map({.data = data.data(),
                            .rows = size_t(rows),
                            .columns = size_t(columns),
                            .row_stride = size_t(columns) * 2,
                            .box_rows = rows});
  };
  for (bool stored : {false, true}) {
    CAPTURE(stored);
    const Memory out = to_card(std::vector<float>(2 * kM * kN + kM * kN / 2, -1), stream);
    launch(multiply, "multiply",
           {.grid = 1,
            .block = 128,
            .shared_bytes = shared_bytes<bf16>((kM + kN + 2 * kK) * kRow) + shared_bytes<uint64_t>(1)},
           stream, map_of(on_a, kM, kK), map_of(on_b, kN, kK), map_of(on_v, kK, kN), on_a.as<const bf16>(),
           out.as<float>(), stored);
    const std::vector<float> got = from_card<float>(out, stream);
    int wrong[3] = {};
    for (int m = 0; m < kM; ++m)
      for (int n = 0; n < kN; ++n) {
        float scores = 0, values = 0;
        for (int k = 0; k < kK; ++k) {
          const float x = to_f32(a[size_t(m * kK + k)]);
          scores += x * to_f32(b[size_t(n * kK + k)]);
          values += x * to_f32(v[size_t(k * kN + n)]);
        }
        wrong[0] += got[size_t(m * kN + n)] != scores;
        wrong[1] += got[size_t(kM * kN + m * kN + n)] != values;
        if (n >= kN / 2) wrong[2] += got[size_t(2 * kM * kN + m * kN / 2 + n - kN / 2)] != values;
      }
    CHECK(wrong[0] == 0);  // both from shared memory, k innermost
    CHECK(wrong[1] == 0);  // a from registers, v with n innermost, two halves
    CHECK(wrong[2] == 0);  // 64 columns
  }
}

}  // namespace
}  // namespace xpyd::cuda
