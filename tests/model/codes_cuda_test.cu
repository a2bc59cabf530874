// Products of codes on CUDA against the f32 that they stand for, in double, and models of them against the CPU's.
#include <cmath>
#include <cstring>

#include "base/random.h"
#include "model/codes_cuda.h"
#include "tests/model/cuda_fixture.h"
#ifdef XPYD_SIMT
#include "device_memory.h"
#endif

namespace xpyd::testing::codes_cuda_test {
namespace {

constexpr Dtype kCodes[] = {Dtype::int8, Dtype::int4, Dtype::fp8};
constexpr double kU = 0x1p-24;

std::vector<float> random_row(int k, Random& random) {
  std::vector<float> x(static_cast<size_t>(k));
  for (float& v : x) v = float(random.uniform() * 2 - 1) + 0.25f;
  return x;
}

// A matrix of codes on the card, and what they stand for.
struct OnCard {
  OnCard(int n, int k, Dtype dtype, const QuantGroups& groups, cuda::Stream& stream, uint64_t seed = 1)
      : w(size_t(n) * size_t(k)) {
    Random random(seed);
    std::vector<QuantRow> rows;
    for (int row = 0; row < n; ++row) {
      QuantRow made(dtype, k, groups.count);
      const auto from = random_row(k, random);
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

// Every element of products of several numbers of rows; x's rows are x_stride apart.
void check_products(const OnCard& on, Dtype x_dtype, Dtype y_dtype, int x_stride, const std::vector<int>& rows,
                    cuda::Stream& stream) {
  const int n = on.matrix.n, k = on.matrix.k, most = rows[0], y_stride = n + 3;
  Random random(7);
  std::vector<float> x(size_t(most * x_stride), 1e9f);  // nobody reads what lies between the rows
  for (int m = 0; m < most; ++m) {
    auto row = random_row(k, random);
    for (float& v : row) v = x_dtype == Dtype::bf16 ? to_f32(to_bf16(v)) : v;
    std::copy(row.begin(), row.end(), x.begin() + m * x_stride);
  }
  cuda::Memory on_x = floats_to_card(x, x_dtype, stream);
  std::vector<float> whole;
  for (int m : rows) {
    CAPTURE(m);
    const size_t size = size_t(most * y_stride);
    cuda::Memory y = floats_to_card(std::vector<float>(size, -7), y_dtype, stream);
    cuda_codes({.x = on_x.data(),
                .y = y.data(),
                .w = on.matrix,
                .x_dtype = x_dtype,
                .y_dtype = y_dtype,
                .m = m,
                .x_stride = x_stride,
                .y_stride = y_stride},
               stream);
    const auto got = floats_from_card(y.data(), size, y_dtype, stream);
    if (m == most) whole = got;
    for (int i = 0; i < most; ++i)
      for (int j = 0; j < y_stride; ++j) {
        const float value = got[size_t(i * y_stride + j)];
        if (i >= m || j >= n) {
          REQUIRE(value == -7);
          continue;
        }
        REQUIRE(std::memcmp(&value, &whole[size_t(i * y_stride + j)], 4) == 0);
        if (m != most) continue;
        double want = 0, terms = 0;
        for (int t = 0; t < k; ++t) {
          const double term = double(x[size_t(i * x_stride + t)]) * double(on.w[size_t(j * k + t)]);
          want += term, terms += std::fabs(term);
        }
        const double rounding = y_dtype == Dtype::bf16 ? 0x1p-8 : kU;
        CAPTURE(i, j, value, want);
        REQUIRE(std::fabs(double(value) - want) <= (2 * k + 8) * kU * terms + rounding * std::fabs(want));
      }
  }
}

TEST_CASE("cuda codes: every element against double, and a row's bits for every M", "[cuda][model][gemm]") {
  cuda::Stream stream;
  const struct {
    int n, k;
    QuantGroups groups;
    bool in_order;
  } forms[] = {{37, 904, even_groups(904, 128), true},  // tiles, steps and parts of K that are not whole
               {130, 640, even_groups(640, 0), true},   // one scale for an output; tiles of two blocks
               {20, 320, even_groups(320, 32), true},   // pieces of 32
               {16, 200, even_groups(200, 48), false},  // groups of no whole quarters
               {33, 304, scattered(304, 64), false},    // GPTQ's desc_act
               {5, 8, even_groups(8, 0), true}};
  for (Dtype dtype : kCodes)
    for (const auto& form : forms) {
      CAPTURE(dtype_name(dtype), form.n, form.k, form.in_order);
      const OnCard on(form.n, form.k, dtype, form.groups, stream);
      CHECK(on.in_order == form.in_order);
      check_products(on, Dtype::bf16, Dtype::f32, form.k + 8, {70, 0, 1, 2, 8, 9, 16, 17, 64, 65}, stream);
      check_products(on, Dtype::bf16, Dtype::bf16, form.k + 8, {17, 16, 1}, stream);
      check_products(on, Dtype::f32, Dtype::f32, form.k + 4, {18, 9, 1}, stream);
    }
  // Blocks in bands of outputs, the last one narrower: for few rows and for many.
  const OnCard wide(2100, 32, Dtype::int4, even_groups(32, 0), stream);
  check_products(wide, Dtype::bf16, Dtype::f32, 40, {65, 1}, stream);
}

TEST_CASE("cuda codes: rows that begin anywhere, and K of no whole piece", "[cuda][model][gemm]") {
  cuda::Stream stream;
  for (Dtype dtype : kCodes) {
    const OnCard on(18, 140, dtype, even_groups(140, 32), stream), odd(18, 149, dtype, even_groups(149, 128), stream);
    for (Dtype x : {Dtype::bf16, Dtype::f32}) {
      check_products(on, x, Dtype::f32, 141, {3, 1}, stream);
      check_products(odd, x, Dtype::f32, 152, {20, 1, 10}, stream);
    }
  }
}

// Each takes what the one before it gives. On the interpreter it comes to its wait before that one has begun.
TEST_CASE("cuda codes: a row of them that start early gives what those give that do not", "[cuda][model][gemm]") {
#ifdef XPYD_SIMT
  cuda::simt::Late late(true);
#endif
  cuda::Stream stream;
  constexpr int kWide = 160;
  for (Dtype dtype : kCodes) {
    const OnCard on(kWide, kWide, dtype, even_groups(kWide, 32), stream);
    Random random(3);
    std::vector<float> x;
    for (int i = 0; i < 20; ++i)
      for (float v : random_row(kWide, random)) x.push_back(v * 0.02f);
    auto run = [&](bool early, int m) {
      cuda::Memory here = floats_to_card(x, Dtype::bf16, stream), there = floats_to_card(x, Dtype::bf16, stream);
      for (int i = 0; i < 4; ++i) {
        cuda_codes({.x = here.data(),
                    .y = there.data(),
                    .w = on.matrix,
                    .x_dtype = Dtype::bf16,
                    .y_dtype = Dtype::bf16,
                    .m = m,
                    .x_stride = kWide,
                    .y_stride = kWide},
                   {stream, early});
        std::swap(here, there);
      }
      return floats_from_card(here.data(), size_t(m * kWide), Dtype::bf16, stream);
    };
    for (int m : {1, 20}) CHECK(run(true, m) == run(false, m));
  }
}

std::vector<float> logits_of(Model& model, const CudaKv& kv, const std::vector<int32_t>& prompt, int chunk) {
  std::vector<float> all;
  for (int at = 0; at < int(prompt.size()); at += chunk) {
    const int end = std::min(at + chunk, int(prompt.size()));
    const auto part = run_step(model, {kv.view()}, {{prompt.begin() + at, prompt.begin() + end}}, {at});
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST_CASE("cuda codes: a model of them is the CPU's, and its bits are the same in one step and in chunks",
          "[cuda][model]") {
  std::vector<int32_t> prompt;
  for (int i = 0; i < 11; ++i) prompt.push_back((i * 37 + 101 + i * i * 5) % 200);
  const struct {
    const char* name;
    Dtype codes;
    int group;
    Dtype dtype;
  } models[] = {{"llama31", Dtype::int8, 0, Dtype::f32},  // its embeddings are tied
                {"llama31", Dtype::int4, 0, Dtype::bf16},
                {"qwen2", Dtype::int4, 8, Dtype::f32},
                {"qwen2", Dtype::fp8, 0, Dtype::bf16}};
  for (const auto& m : models) {
    CAPTURE(m.name, dtype_name(m.codes), m.group, dtype_name(m.dtype));
    CudaLoaded loaded(data_path(std::string("models/") + m.name), CudaLoaded::small(),
                      {.dtype = m.dtype, .weight_dtype = m.codes, .weight_group = m.group});
    CHECK(loaded.weights->layers[1].down.codes.dtype == m.codes);
    CHECK(loaded.weights->lm_head.codes.dtype == m.codes);
    CHECK_FALSE(is_quantised(loaded.weights->embedding.codes.dtype));
    // Graphs take the steps of one token.
    CudaKv kv(*loaded.model, loaded.stream, 20), again(*loaded.model, loaded.stream, 20),
        seven(*loaded.model, loaded.stream, 20);
    const auto got = logits_of(*loaded.model, kv, prompt, 64);
    CHECK(logits_of(*loaded.model, again, prompt, 1) == got);
    CHECK(loaded.model->counts().replays > 0);
    CHECK(logits_of(*loaded.model, seven, prompt, 7) == got);
    const auto exact = make_llama(loaded.host.weights, loaded.host.team, 64, 64, {.gemm = &default_gemm(true)});
    const auto want = run_prompt(*exact, prompt, 64);
    double error = 0, size = 0, largest = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double difference = double(got[i]) - double(want[i]);
      error += difference * difference, size += std::pow(double(want[i]), 2);
      largest = std::max(largest, std::fabs(difference));
    }
    REQUIRE(size > 0);
    // Bounds as in llama_cuda_test.cu; bf16 here rounds activations alone.
    if (m.dtype == Dtype::f32)
      CHECK(largest < 2e-5);
    else
      CHECK(std::sqrt(error / size) < 0.04);
  }
}

}  // namespace
}  // namespace xpyd::testing::codes_cuda_test
