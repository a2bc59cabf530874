// Tests model/cuda/gemm_cuda.cu's choice of algorithms over a cuBLASLt with planted orders of additions (cublasLt.h
// beside this).
#include "base/cuda/cuda.h"
#include "tests/catch.h"
#include "tests/model/cuda_fixture.h"

// Everywhere else CudaGemm is the class of gemm_simt.cc. The kernel for few rows comes from the library of tests.
#define CudaGemm LibraryGemm
#pragma GCC diagnostic ignored "-Wsubobject-linkage"  // harmless in a single file
#include "model/cuda/gemm_cuda.cu"

namespace cublas = simt::cublas;

namespace xpyd::testing {
namespace {

using cublas::Order;
constexpr int kN = 24, kMost = 1024;

struct Choice {
  // Each choice needs its own k, because the process remembers choices.
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
  for (bool only_bf16 : {false, true}) {
    cuda::Stream stream;
    Choice c({{1, Order::descending, 1, 8, 0, only_bf16}, {2, Order::ascending, 1, 1 << 20, 0, only_bf16}},
             256 + 8 * only_bf16, stream);
    REQUIRE(c.gemm.prepare(c.args, kMost).ok());
    for (int m : {1, 2, 3, 4, 8, 9, 256}) CHECK(c.chosen(m) == 2);
    const std::vector<float> whole = c.run(0, kMost);
    for (int row = 0; row < kMost; ++row) {
      const std::vector<float> alone = c.run(row, 1);
      REQUIRE(std::memcmp(alone.data(), whole.data() + row * kN, size_t(kN) * 4) == 0);
    }
  }
}

TEST_CASE("cuda gemm: orders that no bf16 row tells apart are told apart in f32", "[cuda][model][gemm]") {
  // With K of 8 an order changes one bit in some 2^13, and bf16 rows hide nearly all of that.
  cuda::Stream stream;
  Choice c({{1, Order::halves, 1, 4}, {2, Order::ascending, 1, 1 << 20}}, 8, stream);
  REQUIRE(c.gemm.prepare(c.args, kMost).ok());
  CHECK(c.chosen(1) == 2);
  CHECK(c.chosen(4) == 2);
}

TEST_CASE("cuda gemm: a partition of the device gets its own algorithms in the device's order", "[cuda][model][gemm]") {
  cuda::Card card;
  card.n_sms = 16;
  auto split = cuda::Split::cut(card, 4).value();
  cuda::Stream whole, part(split->make_stream(0, false));
  const std::vector<cublas::Algorithm> algorithms = {
      {1, Order::ascending, 1, 1 << 20}, {2, Order::descending, 1, 1 << 20, 4}, {3, Order::ascending, 1, 1 << 20, 4}};
  Choice of_card(algorithms, 96, whole), of_part(algorithms, 96, part);
  REQUIRE(of_card.gemm.prepare(of_card.args, kMost).ok());
  cublas::ran.clear();
  REQUIRE(of_part.gemm.prepare(of_part.args, kMost).ok());
  // The choice for 4 SMs uses the heuristics for 4 SMs, and has the bits of the whole device.
  CHECK(std::count(cublas::ran.begin(), cublas::ran.end(), 3) > 0);
  CHECK(of_card.chosen(5) == 1);
  CHECK(of_part.chosen(5) != 2);
  CHECK(of_card.run(0, 5) == of_part.run(0, 5));
  // A choice that no longer starts gives way to another of the same order.
  const std::vector<float> before = of_part.run(0, 5);
  const int first = of_part.chosen(5);
  cublas::broken = {first};
  CHECK(of_part.run(0, 5) == before);
  CHECK(of_part.chosen(5) == 4 - first);
}

TEST_CASE("cuda gemm: our kernel takes few rows where it has the order's bits, and only there", "[cuda][model][gemm]") {
  cuda::Stream stream;
  // K ends in half a group of 16. The library's algorithm runs only more rows than ours.
  Choice c({{1, Order::sixteens, 1, 1 << 20, 0, false, kGemvRows + 1}}, 56, stream);
  REQUIRE(c.gemm.prepare(c.args, kMost).ok());
  CHECK(c.gemm.describe().find("gemv") != std::string::npos);
  const std::vector<float> whole = c.run(0, kMost);
  for (int m : {1, 2, 7, 8, 9, 16, 32, 33}) {
    CAPTURE(m);
    const int first = 300;
    cublas::ran.clear();
    const std::vector<float> some = c.run(first, m);
    CHECK(cublas::ran.empty() == (m <= kGemvRows));
    CHECK(std::memcmp(some.data(), whole.data() + first * kN, some.size() * 4) == 0);
  }
  // With another order, or where a few bf16 sums cannot tell orders apart, no algorithm takes few rows.
  for (auto [order, only_bf16, k] : {std::tuple(Order::ascending, false, 40), std::tuple(Order::sixteens, true, 72)}) {
    Choice other({{1, order, 1, 1 << 20, 0, only_bf16, kGemvRows + 1}}, k, stream);
    const Status refused = other.gemm.prepare(other.args, kMost);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("best: 0 of 11 sizes") != std::string::npos);
  }
}

TEST_CASE("cuda gemm: where no algorithm of the chosen order starts, another algorithm or our kernel runs",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  // Algorithms 1 (up to M = 16) and 2 (from 17) share an order. Algorithm 3 has another one.
  Choice c({{1, Order::ascending, 1, 16}, {2, Order::ascending, 17, 1 << 20}, {3, Order::halves, 1, 1 << 20}}, 48,
           stream);
  REQUIRE(c.gemm.prepare(c.args, kMost).ok());
  const std::vector<float> few = c.run(0, 4), many = c.run(0, 40);
  cublas::broken = {1};
  CHECK(c.run(0, 4) == few);
  CHECK(c.chosen(4) == 2);  // of the same order
  cublas::broken = {1, 2};
  CHECK(c.chosen(40) == 3);
  cublas::broken = {1, 2, 3};  // our kernel remains, for 32 rows at a time
  cublas::ran.clear();
  const std::vector<float> ours = c.run(0, 40);
  CHECK(cublas::ran.empty());
  for (size_t i = 0; i < many.size(); ++i) CHECK(std::abs(ours[i] - many[i]) < 0.1f);
}

}  // namespace xpyd::testing
