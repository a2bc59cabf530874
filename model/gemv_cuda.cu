// A block is one warp with 16 rows of W: its products are the 16 rows of an mma, x's rows the 8
// columns. W goes through shared memory in a ring that is deep enough for two warps on an SM to
// keep 40 KB under way, as with the 4,096 outputs of an o_proj.
#include "base/cuda_kernel.h"
#include "model/gemm_cuda.h"

namespace xpyd::model {
namespace {

using cuda::Carver;
using cuda::Shared;

constexpr int kWarp = 32, kColumns = 16;                      // outputs of a block
constexpr int kStep = 128, kPieces = kStep / 8, kStages = 6;  // of K; of 16 bytes; of the ring

template <int kRows>
constexpr size_t ring_bytes() {
  return cuda::shared_bytes<bf16>(kStages * kColumns * kStep) + cuda::shared_bytes<bf16>(kStages * kRows * kStep);
}
// The eight rows of one ldmatrix access lie in eight different groups of four banks.
__device__ inline int swizzled(int row, int piece) { return row * kStep + (piece ^ (row & 7)) * 8; }

// kRows: of x, 8 or 16, zeros beyond a.m.
template <int kRows>
__global__ void __launch_bounds__(kWarp) gemv_kernel(CudaGemmArgs a) {
  Carver carver;
  const Shared<bf16> w = carver.take<bf16>(kStages * kColumns * kStep), x = carver.take<bf16>(kStages * kRows * kStep);
  const int lane = int(threadIdx.x), first = int(blockIdx.x) * kColumns;
  const int n_steps = (a.w.k + kStep - 1) / kStep;
  const bf16* from_w = static_cast<const bf16*>(a.w.data) + size_t(first) * size_t(a.w.stride);
  // Rows [0, n) of a step, of which `valid` are there.
  auto load = [&](const Shared<bf16>& to, int n, const bf16* from, int valid, int stride, int step) {
#pragma unroll
    for (int i = lane; i < n * kPieces; i += kWarp) {
      const int row = i / kPieces, piece = i % kPieces, k = step * kStep + piece * 8;
      const bool there = row < valid && k < a.w.k;
      cuda::cp_async_16(to, swizzled(step % kStages * n + row, piece),
                        from + (there ? size_t(row) * size_t(stride) + size_t(k) : 0), there);
    }
  };
  auto load_w = [&](int step) { load(w, kColumns, from_w, a.w.n - first, a.w.stride, step); };
  auto load_x = [&](int step) { load(x, kRows, static_cast<const bf16*>(a.x), a.m, a.x_stride, step); };
  cuda::let_next_start();
  // W depends on nobody: its stream begins before x is known.
  for (int step = 0; step < kStages - 1 && step < n_steps; ++step) load_w(step);
  cuda::wait_for_previous();
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < n_steps) load_x(step);
    cuda::cp_async_commit();
  }
  float sums[kRows / 8][4] = {};
  for (int step = 0; step < n_steps; ++step) {
    cuda::cp_async_wait<kStages - 2>();
    __syncwarp();  // and all lanes have read the stage that is loaded next
    if (const int next = step + kStages - 1; next < n_steps) load_w(next), load_x(next);
    cuda::cp_async_commit();
    const int at = step % kStages;
#pragma unroll
    for (int pair = 0; pair < kStep / 32; ++pair) {
      uint32_t of_x[kRows / 8][4];
#pragma unroll
      for (int h = 0; h < kRows / 8; ++h)
        cuda::ldmatrix_x4(of_x[h], x, swizzled(at * kRows + h * 8 + lane % 8, 4 * pair + lane / 8));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t of_w[4];
        cuda::ldmatrix_x4(of_w, w, swizzled(at * kColumns + lane % 16, 4 * pair + 2 * i + lane / 16));
#pragma unroll
        for (int h = 0; h < kRows / 8; ++h) cuda::mma_m16n8k16(sums[h], of_w, of_x[h][2 * i], of_x[h][2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kRows / 8; ++h)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first + lane / 4 + i / 2 * 8, row = 8 * h + 2 * (lane % 4) + i % 2;
      if (column >= a.w.n || row >= a.m) continue;
      const size_t place = size_t(row) * size_t(a.y_stride) + size_t(column);
      if (a.y_dtype == Dtype::f32)
        static_cast<float*>(a.y)[place] = sums[h][i];
      else
        static_cast<bf16*>(a.y)[place] = to_bf16(sums[h][i]);
    }
}

}  // namespace

bool cuda_gemv_takes(const CudaGemmArgs& a) {
  return a.x_dtype == Dtype::bf16 && a.m <= kGemvRows && a.w.k % 8 == 0 && a.w.stride % 8 == 0 && a.x_stride % 8 == 0;
}

void cuda_gemv(const CudaGemmArgs& a, const cuda::On& on) {
  XPYD_CHECK(cuda_gemv_takes(a), std::to_string(a.m) + " rows, K " + std::to_string(a.w.k));
  if (a.m == 0) return;
  const bool few = a.m <= 8;
  const cuda::Shape shape{dim3(unsigned((a.w.n + kColumns - 1) / kColumns)), dim3(kWarp),
                          few ? ring_bytes<8>() : ring_bytes<16>()};
  cuda::launch(few ? gemv_kernel<8> : gemv_kernel<16>, "gemv", shape, on, a);
}

}  // namespace xpyd::model
