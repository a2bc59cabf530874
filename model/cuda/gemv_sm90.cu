// Products of few rows, limited by reading W. A block is one warp with 16 outputs. Rows of W are the 16 rows of an mma,
// rows of x its 8 columns; k ascends by 16 into one accumulator. Little work is left to a warp, so the memory stream is
// the limit. The copy engine (TMA) fetches boxes of W and x into a ring. A step of 256 k is 8 loads of x, 16 of W and
// 16 mma. With cp.async, half a step took 478 instructions and reached 1.7 of 3.0 TB/s.
//
// Arithmetic: 4,096 outputs are 256 warps, two on most SMs. Each keeps 4 or 5 stages of 8 KB of W in flight, 64 KB an
// SM. A chain of 16 mma of 33 clocks each is 0.27 us a stage: 30 GB/s a warp, 7.8 TB/s for the card.
#include "base/cuda/cuda_kernel_sm90.h"
#include "model/cuda/gemm_cuda.h"

namespace xpyd::model {
namespace {

using cuda::Carver;
using cuda::kBoxColumns;
using cuda::Shared;
using cuda::TensorMap;

constexpr int kWarp = 32, kOutputs = 16;
constexpr int kBoxes = 4, kStep = kBoxes * kBoxColumns;  // per stage; of K

template <int kRows>  // rows of x: 8, 16 or 32
struct Ring {
  static constexpr int kStages = kRows == 8 ? 5 : 4;
  static constexpr int kBytes = 2 * kStep * (kOutputs + kRows);  // per stage
  static constexpr size_t kSharedBytes = cuda::shared_bytes<bf16>(kStages * kOutputs * kStep) +
                                         cuda::shared_bytes<bf16>(kStages * kRows * kStep) +
                                         cuda::shared_bytes<uint64_t>(kStages);
};

template <int kRows>
__global__ void __launch_bounds__(kWarp)
    gemv_kernel(const __grid_constant__ CudaGemmArgs a, const __grid_constant__ TensorMap of_w,
                const __grid_constant__ TensorMap of_x) {
  using R = Ring<kRows>;
  Carver carver;
  // [stage][box][row][64], swizzled as copy_box() does
  const Shared<bf16> w = carver.take<bf16>(R::kStages * kOutputs * kStep),
                     x = carver.take<bf16>(R::kStages * kRows * kStep);
  const Shared<uint64_t> full = carver.take<uint64_t>(R::kStages);
  const int lane = int(threadIdx.x), first = int(blockIdx.x) * kOutputs;
  const int n_steps = (a.w.k + kStep - 1) / kStep;
  if (lane == 0) {
    for (int i = 0; i < R::kStages; ++i) mbarrier_init(full, i, 1);
    cuda::mbarrier_init_done();
  }
  __syncthreads();
  auto start_w = [&](int step) {
    const int stage = step % R::kStages;
    if (lane == 0) mbarrier_expect(full, stage, R::kBytes);
    __syncwarp();
    if (lane < kBoxes)
      copy_box(w, (stage * kBoxes + lane) * kOutputs * kBoxColumns, of_w, step * kStep + lane * kBoxColumns, first,
               full, stage);
  };
  auto start_x = [&](int step) {
    const int stage = step % R::kStages;
    if (lane < kBoxes)
      copy_box(x, (stage * kBoxes + lane) * kRows * kBoxColumns, of_x, step * kStep + lane * kBoxColumns, 0, full,
               stage);
  };
  cuda::let_next_start();
  // W depends on no earlier kernel, so its stream begins before x is ready.
  for (int step = 0; step < R::kStages && step < n_steps; ++step) start_w(step);
  cuda::wait_for_previous();
  for (int step = 0; step < R::kStages && step < n_steps; ++step) start_x(step);

  // Element index of 16-byte piece `piece` of a box's row.
  auto swizzled = [](int row, int piece) { return row * kBoxColumns + (piece ^ (row & 7)) * 8; };
  float sums[kRows / 8][4] = {};
  for (int step = 0; step < n_steps; ++step) {
    const int stage = step % R::kStages;
    mbarrier_wait(full, stage, step / R::kStages % 2);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int at_w = (stage * kBoxes + box) * kOutputs * kBoxColumns,
                at_x = (stage * kBoxes + box) * kRows * kBoxColumns;
#pragma unroll
      for (int pair = 0; pair < kBoxColumns / 32; ++pair) {
        uint32_t part_x[kRows / 8][4];
#pragma unroll
        for (int h = 0; h < kRows / 8; ++h)
          cuda::ldmatrix_x4(part_x[h], x, at_x + swizzled(h * 8 + lane % 8, 4 * pair + lane / 8));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t part_w[4];
          cuda::ldmatrix_x4(part_w, w, at_w + swizzled(lane % 16, 4 * pair + 2 * i + lane / 16));
#pragma unroll
          for (int h = 0; h < kRows / 8; ++h)
            cuda::mma_m16n8k16(sums[h], part_w, part_x[h][2 * i], part_x[h][2 * i + 1]);
        }
      }
    }
    __syncwarp();  // all lanes have read the stage
    if (const int next = step + R::kStages; next < n_steps) start_w(next), start_x(next);
  }
#pragma unroll
  for (int h = 0; h < kRows / 8; ++h)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int output = first + lane / 4 + i / 2 * 8, row = 8 * h + 2 * (lane % 4) + i % 2;
      if (output >= a.w.n || row >= a.m) continue;
      const size_t place = size_t(row) * size_t(a.y_stride) + size_t(output);
      if (a.y_dtype == Dtype::f32)
        static_cast<float*>(a.y)[place] = sums[h][i];
      else
        static_cast<bf16*>(a.y)[place] = to_bf16(sums[h][i]);
    }
}

TensorMap boxes_of(const void* data, int rows, int columns, int stride, int box_rows) {
  return cuda::make_tensor_map({.data = data,
                                .rows = size_t(rows),
                                .columns = size_t(columns),
                                .row_stride = size_t(stride) * sizeof(bf16),
                                .box_rows = box_rows});
}

template <int kRows>
void run(const CudaGemmArgs& a, const cuda::On& on) {
  const cuda::Shape shape{dim3(unsigned((a.w.n + kOutputs - 1) / kOutputs)), dim3(kWarp), Ring<kRows>::kSharedBytes};
  cuda::launch(gemv_kernel<kRows>, "gemv", shape, on, a, boxes_of(a.w.data, a.w.n, a.w.k, a.w.stride, kOutputs),
               boxes_of(a.x, a.m, a.w.k, a.x_stride, kRows));
}

bool has_copy_engine() {
  static const bool has = [] {
    const Result<cuda::Card> card = cuda::open();
    return card && card.value().major == 9;
  }();
  return has;
}

}  // namespace

bool cuda_gemv_takes(const CudaGemmArgs& a) {
  return a.x_dtype == Dtype::bf16 && a.m <= kGemvRows && a.w.k % 8 == 0 && a.w.stride % 8 == 0 && a.x_stride % 8 == 0 &&
         has_copy_engine();
}

void cuda_gemv(const CudaGemmArgs& a, const cuda::On& on) {
  XPYD_CHECK(cuda_gemv_takes(a), std::to_string(a.m) + " rows, K " + std::to_string(a.w.k));
  if (a.m == 0) return;
  if (a.m <= 8) return run<8>(a, on);
  if (a.m <= 16) return run<16>(a, on);
  run<32>(a, on);
}

}  // namespace xpyd::model
