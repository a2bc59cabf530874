// Tests the interpreter of base/cuda/cuda_kernel_sm90.h: one kernel that uses all of it correctly, and the same kernel
// with one fault at a time.

#include "base/cuda/cuda_kernel_sm90.h"
#include "tests/catch.h"
#include "tests/cuda_arrays.h"

namespace xpyd::testing {
namespace {

using namespace cuda;

constexpr int kRows = 64, kTile = 128, kDim = 64, kRounds = 3;
constexpr int kFull = 0, kFree = 1, kUnused = 2;

// out[64, 64] = sum over tiles b [128, 64] of bf16(a b^T) b. Warps 0 to 3 compute, and warp 4 copies b. Plain stores
// write a.
__global__ void products(int planted, const __grid_constant__ TensorMap map, const bf16* a_from, float* out) {
  Carver carver;
  Shared<bf16> a = carver.take<bf16>(kRows * kDim), b = carver.take<bf16>(kTile * kDim);
  Shared<uint64_t> barriers = carver.take<uint64_t>(3);
  int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    mbarrier_init(barriers, kFull, 1);
    mbarrier_init(barriers, kFree, 4);
    mbarrier_init(barriers, kUnused, 1);
    if (planted != 1) mbarrier_init_done();
  }
  if (planted != 2) __syncthreads();
  if (warp == 4) {
    if (lane > 0) return;  // it may fall behind by more than a phase, which waits do not notice
    for (int i = 0; i < kRounds; ++i) {
      if (planted != 3) mbarrier_wait(barriers, kFree, (i + 1) % 2);
      mbarrier_expect(barriers, kFull, kTile * kDim * 2 + (planted == 4 ? 16 : 0));
      copy_box(b, planted == 5 ? 256 : 0, map, 0, i * kTile, barriers, kFull);
      if (planted == 6) mbarrier_arrive(barriers, kFull);
    }
    if (planted == 7) {  // nothing waits for it
      mbarrier_wait(barriers, kFree, 0);
      mbarrier_expect(barriers, kUnused, kTile * kDim * 2);
      copy_box(b, 0, map, 0, 0, barriers, kUnused);
    }
    return;
  }
  for (int i = thread; i < kRows * kDim / 8; i += 128) {
    int row = i / 8, piece = i % 8;
    store_16(a, row * kDim + (planted == 8 ? piece : piece ^ (row & 7)) * 8, reinterpret_cast<const uint4*>(a_from)[i]);
  }
  if (planted != 9) fence_proxy_async();
  if (planted != 10) barrier_sync(1, planted == 11 && warp == 3 ? 96 : 128);
  if (planted == 12 && warp == 0) return;

  uint64_t a_matrix = matrix_descriptor(shared_address(a, 0)), b_matrix = matrix_descriptor(shared_address(b, 0));
  if (planted == 13) b_matrix ^= uint64_t(3) << 62;        // 64-byte swizzle
  if (planted == 14) b_matrix ^= uint64_t(64 ^ 65) << 32;  // groups of 8 rows 16 bytes too far
  float o[kDim / 8][4] = {}, s[kTile / 8][4];
  uint32_t p[kTile / 16][4];
  for (int i = 0; i < kRounds; ++i) {
    if (planted != 15) mbarrier_wait(barriers, kFull, planted == 16 ? (i + 1) % 2 : i % 2);
    if (planted != 17) wgmma_fence();
    for (int k = 0; k < kDim / 16; ++k)
      wgmma_shared(s, advance(a_matrix, k * 32), advance(b_matrix, k * (planted == 18 ? 16 : 32)), k > 0);
    wgmma_commit();
    if (planted != 19) wgmma_wait<0>();
    keep_operands(s);
    for (int k = 0; k < kTile / 16; ++k)
      for (int j = 0; j < 4; ++j) {
        const float(&block)[4] = s[2 * k + j / 2];
        p[k][j] = pack_bf16(block[j % 2 * 2], block[j % 2 * 2 + 1]);
      }
    wgmma_fence();
    for (int k = 0; k < kTile / 16; ++k) wgmma_registers(o, p[k], advance(b_matrix, k * (planted == 20 ? 1024 : 2048)));
    wgmma_commit();
    if (planted == 21) p[3][2] = 0;
    if (planted == 22) o[1][1] = 0;
    if (planted != 23) wgmma_wait<0>();
    keep_operands(o);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers, kFree);
    if (planted == 24 && thread == 0) mbarrier_arrive(barriers, kFree);
    wgmma_wait<0>();
  }
  if (planted == 25) barrier_arrive(2, 160);
  for (int n = 0; n < kDim / 8; ++n)
    for (int c = 0; c < 4; ++c) out[(warp * 16 + c / 2 * 8 + lane / 4) * kDim + 8 * n + lane % 4 * 2 + c % 2] = o[n][c];
}

struct Planted {
  const char* name;
  const char* message;  // part of the fault's text; null: a wrong result
};
const Planted plants[] = {
    {"initialisation is not published", "need not have seen the mbarrier's initialisation"},
    {"initialisation without a barrier after it", "mbarrier"},
    {"copy before its place is free", "race: writes what"},
    {"more bytes expected than come", "deadlock: "},
    {"copy to the middle of a pattern", "byte 8704 is not a multiple of 1024"},
    {"more arrivals than the barrier has", "more arrivals than it was made for"},
    {"copy under way at the end", "ends with a bulk copy under way"},
    {"swizzle forgotten", nullptr},
    {"proxy fence forgotten", "without a fence_proxy_async"},
    {"barrier of the warpgroup forgotten", "race: reads what warp"},
    {"two counts for one barrier", "others wait for"},
    {"a warp leaves its warpgroup", "deadlock: "},
    {"another swizzle in the descriptor", "only the 128-byte swizzle"},
    {"another stride in the descriptor", nullptr},
    {"wait for the copy forgotten", "race: reads what a bulk copy writes"},
    {"wait for the other parity", "race: reads what a bulk copy writes"},
    {"wgmma_fence forgotten", "no wgmma_fence since"},
    {"descriptor advanced by too little along a row", nullptr},
    {"wait for the scores forgotten", nullptr},
    {"descriptor advanced by too few rows", nullptr},
    {"operand overwritten before the wait", "operand's registers were written before the wait"},
    {"accumulator overwritten before the wait", "accumulator was written before the wait"},
    {"given back before the wait", "race: writes what"},
    {"given back twice", "race: writes what"},
    {"arrivals left over", "ends with arrivals at barrier 2"},
};

// Returns the faults of four launches (both orders of blocks and of threads), and whether results were right.
std::pair<std::string, bool> run(int planted, const char* name) {
  Stream stream;
  std::vector<float> x(kRows * kDim), y(kRounds * kTile * kDim);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 7 % 11) % 3 - 1);
  for (size_t i = 0; i < y.size(); ++i) y[i] = float(int(i * 5 % 13 + i / 64 % 3) % 3 - 1);
  // Integers of at most 64 are exact in bf16.
  std::vector<float> want(kRows * kDim, 0.0f);
  for (size_t r = 0; r < kRows; ++r)
    for (size_t t = 0; t < kRounds * kTile; ++t) {
      float s = 0;
      for (size_t d = 0; d < kDim; ++d) s += x[r * kDim + d] * y[t * kDim + d];
      for (size_t d = 0; d < kDim; ++d) want[r * kDim + d] += s * y[t * kDim + d];
    }

  Memory a = floats_to_card(x, Dtype::bf16, stream), b = floats_to_card(y, Dtype::bf16, stream),
         out = Memory::device(want.size() * 4).value();
  TensorMap map = make_tensor_map(
      {.data = b.data(), .rows = kRounds * kTile, .columns = kDim, .row_stride = kDim * 2, .box_rows = kTile});
  simt::FaultCatcher catcher;
  bool right = true;
  for (int i = 0; i < 4; ++i) {
    launch(products, name, {.grid = 2, .block = 160, .shared_bytes = (kRows + kTile) * kDim * 2 + 32}, stream, planted,
           map, a.as<const bf16>(), out.as<float>());
    right = right && from_card<float>(out.data(), want.size(), stream) == want;
  }
  std::string all;
  for (const std::string& fault : catcher.faults()) all += fault + "\n";
  return {all, right};
}

TEST_CASE("faults planted in sm_90a kernels are caught, and only those", "[simt]") {
  auto [faults, right] = run(0, "sound");
  INFO(faults);
  CHECK(faults == "");
  CHECK(right);
  int planted = 0;
  for (const Planted& plant : plants) {
    auto [found, still_right] = run(++planted, plant.name);
    INFO(planted << ", " << plant.name << ": " << found);
    CHECK((plant.message ? found.find(plant.message) != std::string::npos : !still_right));
  }
}

}  // namespace
}  // namespace xpyd::testing
