// Tests matrix products on CUDA against double: dense matrices by the library and by the kernel for few rows, and
// quantised matrices.
#include <functional>

#include "model/cuda/gemm_cuda.h"
#include "model/cuda/quantised_gemm_cuda.h"
#include "tests/model/cuda_fixture.h"
#ifdef XPYD_SIMT
#include "device_memory.h"
#endif

namespace xpyd::testing::products_cuda_test {
namespace {

constexpr Dtype kCodes[] = {Dtype::int8, Dtype::int4, Dtype::fp8};

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

// Runs a chain of launches, each of which reads the output of the one before. On the interpreter a kernel reaches its
// wait before the previous one has begun.
void check_early(int width, int m, double scale, const std::function<void(const Call&, const cuda::On&)>& run) {
#ifdef XPYD_SIMT
  cuda::simt::Late late(true);
#endif
  cuda::Stream stream;
  Random random(3);
  const auto x = random_floats(size_t(m * width), random, Dtype::bf16, scale);
  std::vector<float> got[2];
  for (bool early : {false, true}) {
    cuda::Memory here = floats_to_card(x, Dtype::bf16, stream), there = floats_to_card(x, Dtype::bf16, stream);
    for (int i = 0; i < 6; ++i) {
      run({here.data(), there.data(), m}, {stream, early});
      std::swap(here, there);
    }
    got[early] = floats_from_card(here.data(), x.size(), Dtype::bf16, stream);
  }
  CHECK(got[0] == got[1]);
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
  CHECK(gemm.describe().find("37 x 50") != std::string::npos);
}

TEST_CASE("cuda gemv: every element agrees with double, and a row's bits are the same for every M",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  Random random(10);
  // Outputs go beyond a block of 16. K goes beyond a stage of 256, and beyond the ring of five stages.
  for (Dtype y_dtype : {Dtype::f32, Dtype::bf16})
    for (auto [n, k] : {std::pair(48, 128), std::pair(37, 1800), std::pair(5, 8)}) {
      const int stride = k + 8, y_stride = n + 3;
      const auto w = random_floats(size_t(n * stride), random, Dtype::bf16);
      cuda::Memory on_w = floats_to_card(w, Dtype::bf16, stream);
      CudaGemmArgs args{.x = on_w.data(),
                        .w = {on_w.data(), n, k, stride},
                        .x_dtype = Dtype::bf16,
                        .y_dtype = y_dtype,
                        .m = kGemvRows,
                        .x_stride = stride,
                        .y_stride = y_stride};
      const auto run = [&](const Call& call) {
        args.x = call.x, args.y = call.y, args.m = call.m;
        REQUIRE(cuda_gemv_takes(args));
        cuda_gemv(args, stream);
      };
      // The hardware truncates every group of 16 products at 2^-24 of the largest.
      check({n, k, stride, y_stride, Dtype::bf16, y_dtype, w, stride, 2.0 * k, run},
            {kGemvRows, 0, 1, 2, 7, 8, 9, 16, 17}, stream);
    }
  CudaGemmArgs more{.w = {nullptr, 8, 64, 64}, .x_dtype = Dtype::bf16, .m = kGemvRows + 1, .x_stride = 64};
  CHECK_FALSE(cuda_gemv_takes(more));
  more.m = kGemvRows;
  CHECK(cuda_gemv_takes(more));
  more.w.k = 60;
  CHECK_FALSE(cuda_gemv_takes(more));
}

// A quantised matrix on the GPU, and the values that it stands for.
struct OnCard {
  OnCard(int n, int k, Dtype dtype, const QuantGroups& groups, cuda::Stream& stream) : w(size_t(n) * size_t(k)) {
    Random random(1);
    std::vector<QuantRow> rows;
    for (int row = 0; row < n; ++row) {
      QuantRow made(dtype, k, groups.count);
      const auto from = random_floats(size_t(k), random, Dtype::f32, 1, 0.25);
      REQUIRE(quantise_row(dtype, groups, from.data(), made));
      widen_row(dtype, groups, made, w.data() + size_t(row) * size_t(k));
      rows.push_back(made);
    }
    ThreadTeam team(1);
    const PackedMatrix packed = pack_codes(
        n, k, 8, dtype, groups, [&](int row, QuantRow& out) { out = rows[size_t(row)]; }, team);
    const CodeTiles tiles = lay_out_tiles(packed);
    std::vector<std::byte> bytes(size_t(tiles.n_tiles) * size_t(tiles.bytes));
    for (int tile = 0; tile < tiles.n_tiles; ++tile)
      write_tile(packed, tiles, tile, bytes.data() + size_t(tile) * size_t(tiles.bytes));
    data = to_card(bytes, stream);
    matrix = {data.data(), n, k, tiles.bytes, tiles.codes};
    in_order = tiles.in_order;
    if (!in_order) inputs = to_card(tiles.inputs, stream), matrix.codes.inputs = inputs.as<int32_t>();
  }
  void check_with(Dtype x_dtype, Dtype y_dtype, int x_stride, const std::vector<int>& rows,
                  cuda::Stream& stream) const {
    const int n = matrix.n, k = matrix.k;
    const auto run = [&](const Call& call) {
      cuda_quantised_gemm({.x = call.x,
                           .y = call.y,
                           .w = matrix,
                           .x_dtype = x_dtype,
                           .y_dtype = y_dtype,
                           .m = call.m,
                           .x_stride = x_stride,
                           .y_stride = n + 3},
                          stream);
    };
    check({n, k, x_stride, n + 3, x_dtype, y_dtype, w, k, 2.0 * k + 8, run}, rows, stream);
  }
  std::vector<float> w;  // [n, k]
  cuda::Memory data, inputs;
  CudaMatrix matrix;
  bool in_order = true;
};

QuantGroups scattered(int k, int size) {
  QuantGroups groups = even_groups(k, size);
  Random random(5);
  for (size_t i = groups.of.size(); i > 1; --i) std::swap(groups.of[i - 1], groups.of[random.below(i)]);
  return groups;
}

TEST_CASE("cuda codes: every element agrees with double, and a row's bits are the same for every M",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  const struct {
    int n, k;
    QuantGroups groups;
    bool in_order;
  } forms[] = {{37, 904, even_groups(904, 128), true},  // partial tiles, steps and parts of K
               {130, 640, even_groups(640, 0), true},   // one scale for an output; tiles of two blocks
               {20, 320, even_groups(320, 32), true},   // pieces of 32
               {16, 200, even_groups(200, 48), false},  // groups that are not whole quarters
               {33, 304, scattered(304, 64), false},    // GPTQ's desc_act
               {5, 8, even_groups(8, 0), true}};
  for (Dtype dtype : kCodes) {
    CAPTURE(dtype_name(dtype));
    for (const auto& form : forms) {
      CAPTURE(form.in_order);
      const OnCard on(form.n, form.k, dtype, form.groups, stream);
      CHECK(on.in_order == form.in_order);
      on.check_with(Dtype::bf16, Dtype::f32, form.k + 8, {70, 0, 1, 2, 8, 9, 16, 17, 64, 65}, stream);
      on.check_with(Dtype::bf16, Dtype::bf16, form.k + 8, {17, 16, 1}, stream);
      on.check_with(Dtype::f32, Dtype::f32, form.k + 4, {18, 9, 1}, stream);
    }
    // Rows begin at any address, and K is not a whole number of pieces.
    const OnCard on(18, 140, dtype, even_groups(140, 32), stream), odd(18, 149, dtype, even_groups(149, 128), stream);
    for (Dtype x : {Dtype::bf16, Dtype::f32}) {
      on.check_with(x, Dtype::f32, 141, {3, 1}, stream);
      odd.check_with(x, Dtype::f32, 152, {20, 1, 10}, stream);
    }
  }
  // Blocks are in bands of outputs, the last band narrower. This is for few rows and for many.
  const OnCard wide(2100, 32, Dtype::int4, even_groups(32, 0), stream);
  wide.check_with(Dtype::bf16, Dtype::f32, 40, {65, 1}, stream);
}

TEST_CASE("cuda gemv and codes: a chain of launches with early start has the bits of one without",
          "[cuda][model][gemm]") {
  cuda::Stream stream;
  Random random(11);
  constexpr int kDense = 136, kCoded = 160;
  const auto w = random_floats(kDense * kDense, random, Dtype::bf16);
  cuda::Memory on_w = floats_to_card(w, Dtype::bf16, stream);
  check_early(kDense, 1, 1, [&](const Call& call, const cuda::On& on) {
    cuda_gemv({.x = call.x,
               .y = call.y,
               .w = {on_w.data(), kDense, kDense, kDense},
               .x_dtype = Dtype::bf16,
               .y_dtype = Dtype::bf16,
               .m = call.m,
               .x_stride = kDense,
               .y_stride = kDense},
              on);
  });
  for (Dtype dtype : kCodes) {
    const OnCard codes(kCoded, kCoded, dtype, even_groups(kCoded, 32), stream);
    for (int m : {1, 20})
      check_early(kCoded, m, 0.02, [&](const Call& call, const cuda::On& on) {
        cuda_quantised_gemm({.x = call.x,
                             .y = call.y,
                             .w = codes.matrix,
                             .x_dtype = Dtype::bf16,
                             .y_dtype = Dtype::bf16,
                             .m = call.m,
                             .x_stride = kCoded,
                             .y_stride = kCoded},
                            on);
      });
  }
}

}  // namespace
}  // namespace xpyd::testing::products_cuda_test
