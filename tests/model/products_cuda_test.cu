// Tests matrix products on CUDA against double.
#include "model/cuda/gemm_cuda.h"
#include "tests/model/cuda_fixture.h"

namespace xpyd::testing::products_cuda_test {

// Checks every element for several numbers of rows, the largest first, and that a row's bits are the same for each
// number.
void check(int n, int k, Dtype dtype, Dtype y_dtype) {
  CAPTURE(n, k, dtype_name(dtype), dtype_name(y_dtype));
  constexpr int kMost = 21;
  const int stride = (k + 7) / 8 * 8, y_stride = (n + 15) / 8 * 8;
  cuda::Stream stream;
  Random random(7);
  const auto w = random_floats(size_t(n * stride), random, dtype);
  std::vector<float> x(size_t(kMost * stride), 1e9f);  // nothing reads between the rows
  for (int m = 0; m < kMost; ++m) {
    const auto row = random_floats(size_t(k), random, dtype, 1, 0.25);
    std::copy(row.begin(), row.end(), x.begin() + m * stride);
  }
  cuda::Memory on_w = floats_to_card(w, dtype, stream), on_x = floats_to_card(x, dtype, stream);
  CudaGemm gemm(stream);
  CudaGemmArgs args{.x = on_x.data(),
                    .w = {on_w.data(), n, k, stride},
                    .x_dtype = dtype,
                    .y_dtype = y_dtype,
                    .x_stride = stride,
                    .y_stride = y_stride};
  REQUIRE(gemm.prepare(args, kMost).ok());
  const size_t size = size_t(kMost * y_stride);
  std::vector<float> whole;
  for (int m : {kMost, 0, 1, 2, 3, 8, 17}) {
    CAPTURE(m);
    cuda::Memory y = floats_to_card(std::vector<float>(size, -7), y_dtype, stream);
    args.y = y.data(), args.m = m;
    gemm.run(args);
    const auto got = floats_from_card(y.data(), size, y_dtype, stream);
    if (m == kMost) whole = got;
    for (int i = 0; i < kMost; ++i)
      for (int j = 0; j < y_stride; ++j) {
        const size_t at = size_t(i * y_stride + j);
        if (i >= m || j >= n) {
          REQUIRE(got[at] == -7);
          continue;
        }
        REQUIRE(std::memcmp(&got[at], &whole[at], 4) == 0);
        if (m != kMost) continue;
        double want = 0, terms = 0;
        for (int t = 0; t < k; ++t) {
          const double term = double(x[size_t(i * stride + t)]) * double(w[size_t(j * stride + t)]);
          want += term, terms += std::fabs(term);
        }
        CAPTURE(i, j, got[at], want);
        REQUIRE(near(got[at], want, k * kU * terms + roundoff(y_dtype) * std::fabs(want)));
      }
  }
}

TEST_CASE("cuda gemm: every element agrees with double, and a row's bits are the same for every M",
          "[cuda][model][gemm]") {
  for (auto [dtype, y_dtype] :
       {std::pair(Dtype::f32, Dtype::f32), std::pair(Dtype::bf16, Dtype::bf16), std::pair(Dtype::bf16, Dtype::f32)}) {
    check(64, 128, dtype, y_dtype);
    check(37, 50, dtype, y_dtype);
  }
}

}  // namespace xpyd::testing::products_cuda_test
