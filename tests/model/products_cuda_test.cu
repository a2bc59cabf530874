// Tests matrix products on CUDA against double.
#include <functional>

#include "model/cuda/gemm_cuda.h"
#include "tests/model/cuda_fixture.h"

namespace xpyd::testing::products_cuda_test {
namespace {

struct Call {
  const void* x;
  void* y;
  int m;
};
struct Product {
  int n, k, x_stride, y_stride;
  Dtype x_dtype, y_dtype;
  const std::vector<float>& w;  // rows of w_stride
  int w_stride;
  double roundings;  // for each term and sum
  std::function<void(const Call&)> run;
};

// Checks every element for several numbers of rows, the largest first, and that a row's bits are the same for each
// number.
void check(const Product& p, const std::vector<int>& rows, cuda::Stream& stream) {
  CAPTURE(p.n, p.k, dtype_name(p.x_dtype), dtype_name(p.y_dtype));
  const int most = rows[0];
  Random random(7);
  std::vector<float> x(size_t(most * p.x_stride), 1e9f);  // nothing reads between the rows
  for (int m = 0; m < most; ++m) {
    const auto row = random_floats(size_t(p.k), random, p.x_dtype, 1, 0.25);
    std::copy(row.begin(), row.end(), x.begin() + m * p.x_stride);
  }
  cuda::Memory on_x = floats_to_card(x, p.x_dtype, stream);
  std::vector<float> whole;
  for (int m : rows) {
    CAPTURE(m);
    const size_t size = size_t(most * p.y_stride);
    cuda::Memory y = floats_to_card(std::vector<float>(size, -7), p.y_dtype, stream);
    p.run({on_x.data(), y.data(), m});
    const auto got = floats_from_card(y.data(), size, p.y_dtype, stream);
    if (m == most) whole = got;
    for (int i = 0; i < most; ++i)
      for (int j = 0; j < p.y_stride; ++j) {
        const float value = got[size_t(i * p.y_stride + j)];
        if (i >= m || j >= p.n) {
          REQUIRE(value == -7);
          continue;
        }
        REQUIRE(std::memcmp(&value, &whole[size_t(i * p.y_stride + j)], 4) == 0);
        if (m != most) continue;
        double want = 0, terms = 0;
        for (int t = 0; t < p.k; ++t) {
          const double term = double(x[size_t(i * p.x_stride + t)]) * double(p.w[size_t(j * p.w_stride + t)]);
          want += term, terms += std::fabs(term);
        }
        CAPTURE(i, j, value, want);
        REQUIRE(near(value, want, p.roundings * kU * terms + roundoff(p.y_dtype) * std::fabs(want)));
      }
  }
}

TEST_CASE("cuda gemm: every element agrees with double, and a row's bits are the same for every M",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  Random random(7);
  CudaGemm gemm(stream);
  for (auto [dtype, y_dtype] :
       {std::pair(Dtype::f32, Dtype::f32), std::pair(Dtype::bf16, Dtype::bf16), std::pair(Dtype::bf16, Dtype::f32)})
    for (auto [n, k] : {std::pair(64, 128), std::pair(37, 50)}) {
      const int stride = (k + 7) / 8 * 8, y_stride = (n + 15) / 8 * 8;
      const auto w = random_floats(size_t(n * stride), random, dtype);
      cuda::Memory on_w = floats_to_card(w, dtype, stream);
      CudaGemmArgs args{.x = on_w.data(),
                        .w = {on_w.data(), n, k, stride},
                        .x_dtype = dtype,
                        .y_dtype = y_dtype,
                        .x_stride = stride,
                        .y_stride = y_stride};
      REQUIRE(gemm.prepare(args, 21).ok());
      const auto run = [&](const Call& call) {
        args.x = call.x, args.y = call.y, args.m = call.m;
        gemm.run(args);
      };
      check({n, k, stride, y_stride, dtype, y_dtype, w, stride, double(k), run}, {21, 0, 1, 2, 3, 8, 17}, stream);
    }
}

}  // namespace
}  // namespace xpyd::testing::products_cuda_test
