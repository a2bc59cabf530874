// Tests model/cuda/gemm_cuda.cu's choice of algorithms over a cuBLASLt with planted orders of additions (cublasLt.h
// beside this).
#include "base/cuda/cuda.h"
#include "tests/catch.h"
#include "tests/model/cuda_fixture.h"

// Everywhere else CudaGemm is the class of gemm_simt.cc.
#define CudaGemm LibraryGemm
#pragma GCC diagnostic ignored "-Wsubobject-linkage"  // harmless in a single file
#include "model/cuda/gemm_cuda.cu"

namespace cublas = simt::cublas;

namespace xpyd::testing {
namespace {

using cublas::Order;
constexpr int kN = 24, kMost = 1024;

struct Choice {
  Choice(std::vector<cublas::Algorithm> algorithms, int k, cuda::Stream& on, Dtype y_dtype = Dtype::bf16)
      : stream(on), gemm(on) {
    cublas::all = std::move(algorithms);
    cublas::broken.clear();
    Random random{uint64_t(k)};
    auto draw = [&](int n) {
      std::vector<float> values(size_t(n) * size_t(k));
      for (float& value : values) value = float(2 * random.uniform() - 1);
      return floats_to_card(values, Dtype::bf16, stream);
    };
    w = draw(kN), x = draw(kMost);
    args = {.x = x.data(),
            .w = {w.data(), kN, k, k},
            .x_dtype = Dtype::bf16,
            .y_dtype = y_dtype,
            .x_stride = k,
            .y_stride = kN};
  }
  // Returns the algorithm that runs for this size.
  int chosen(int m) {
    run(0, m);
    return cublas::ran.back();
  }
  std::vector<float> run(int first, int m) {
    cuda::Memory y = floats_to_card(std::vector<float>(size_t(m * kN), -7), args.y_dtype, stream);
    CudaGemmArgs some = args;
    some.x = x.as<bf16>() + size_t(first) * size_t(args.x_stride);
    some.y = y.data(), some.m = m;
    gemm.run(some);
    return floats_from_card(y.data(), size_t(m * kN), args.y_dtype, stream);
  }
  cuda::Stream& stream;
  LibraryGemm gemm;
  cuda::Memory w, x;
  CudaGemmArgs args;
};

}  // namespace

TEST_CASE("cuda gemm: an order that one bf16 row hides is not taken for M = 1", "[cuda][model][gemm]") {
  // For small M the heuristics name the wrong order first. Its bf16 rows are mostly the same.
  for (Dtype y_dtype : {Dtype::bf16, Dtype::f32}) {
    cuda::Stream stream;
    Choice c({{1, Order::descending, 1, 8}, {2, Order::ascending, 1, 1 << 20}}, 264, stream, y_dtype);
    REQUIRE(c.gemm.prepare(c.args, kMost).ok());
    for (int m : {1, 2, 3, 4, 8, 9, 256}) CHECK(c.chosen(m) == 2);
    const std::vector<float> whole = c.run(0, kMost);
    for (int row = 0; row < kMost; ++row) {
      const std::vector<float> alone = c.run(row, 1);
      REQUIRE(std::memcmp(alone.data(), whole.data() + row * kN, size_t(kN) * 4) == 0);
    }
  }
}

TEST_CASE("cuda gemm: the reference is of M = 1,024, whatever the largest step is, and it does not split K",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  // Up to M = 64 the heuristics name another order alone. At 1,024 they name one that splits K first.
  const std::vector<cublas::Algorithm> algorithms = {
      {1, Order::descending, 1, 64}, {2, Order::halves, 65, 1 << 20, true}, {3, Order::ascending, 65, 1 << 20}};
  Choice c(algorithms, 64, stream, Dtype::f32);
  REQUIRE(c.gemm.prepare(c.args, 20).ok());
  for (int m : {1, 2, 16, 20}) CHECK(c.chosen(m) == 3);
  Choice none({{1, Order::ascending, 1, 1 << 20, true}}, 64, stream);
  const Status refused = none.gemm.prepare(none.args, 20);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::unavailable);
  CHECK(refused.error().message.find("that does not split K") != std::string::npos);
}

TEST_CASE("cuda gemm: where no algorithm keeps the reference's bits for some size, the product is refused",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  Choice c({{1, Order::descending, 1, 64}, {2, Order::ascending, 65, 1 << 20, false, 65}}, 64, stream, Dtype::f32);
  const Status refused = c.gemm.prepare(c.args, kMost);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::unavailable);
  CHECK(refused.error().message.find("M = 1, that keeps the bits of rows") != std::string::npos);
}

TEST_CASE("cuda gemm: where the chosen algorithm does not start, the reference runs", "[cuda][model][gemm]") {
  cuda::Stream stream;
  // Algorithms 1 (up to M = 16) and 2 (from 17) share an order.
  Choice c({{1, Order::ascending, 1, 16}, {2, Order::ascending, 17, 1 << 20}}, 48, stream);
  REQUIRE(c.gemm.prepare(c.args, kMost).ok());
  // Timing decides between the two, so several sizes are tried.
  for (int m : {1, 2, 4, 8, 16}) {
    cublas::broken.clear();
    const std::vector<float> few = c.run(0, m);
    cublas::broken = {1};
    CHECK(c.run(0, m) == few);
    CHECK(c.chosen(m) == 2);
  }
}

}  // namespace xpyd::testing
