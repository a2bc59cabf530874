// The rows of the GEMM table that run on this CPU. The AVX-512 rows also run in emulation on every CPU with AVX2, and
// the hidden [emulated] tests repeat the same tests over them.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "model/gemm/gemm.h"
#include "model/gemm/gemm_kernels.h"
#include "model/gemm/quantised.h"
#include "tests/catch.h"

namespace xpyd::model {
#if defined(__x86_64__)
extern const GemmKernels kAvx512Kernels_emulated;
extern const DotKernels kAvx512Dot_emulated, kAvx512Dot8_emulated, kAvx512VnniDot_emulated, kAvx512VnniDot8_emulated,
    kAvx512Bf16Dot_emulated;
#endif
}  // namespace xpyd::model

// TEST_ROWS(function, name, tags, here, emulated) { ... rows ... } defines two tests, one over each list of rows.
#define TEST_ROWS(function, name, tags, here, emulated)                   \
  static void function(const decltype(here())& rows);                     \
  TEST_CASE(name, tags) { function(here()); }                             \
  TEST_CASE(name ", emulated", "[.][emulated]") { function(emulated()); } \
  static void function([[maybe_unused]] const decltype(here())& rows)
#define TEST_GEMM_ROWS(function, name, tags) TEST_ROWS(function, name, tags, gemm_rows, emulated_gemm_rows)

namespace xpyd::testing {

inline std::vector<const GemmVariant*> gemm_rows() {
  std::vector<const GemmVariant*> rows;
  for (const GemmVariant& v : gemm_variants())
    if (v.available())
      rows.push_back(&v);
    else if (v.needs <= Isa::avx2)
      mark_skipped(std::string(v.name) + " does not run on this CPU");
  return rows;
}

#if defined(__x86_64__)
template <const DotKernels* kDot>
void run_emulated(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
  run_gemm(args, scratch, team, kAvx512Kernels_emulated, kDot);
}
#endif

inline std::vector<const GemmVariant*> emulated_gemm_rows() {
  std::vector<const GemmVariant*> rows;
#if defined(__x86_64__)
  static const GemmVariant emulated[] = {
      {"avx512_bf16 emulated", run_emulated<&kAvx512Bf16Dot_emulated>, Isa::avx2, 8, 8, ""},
      {"avx512_vnni8 emulated", run_emulated<&kAvx512VnniDot8_emulated>, Isa::avx2, 8, 8, ""},
      {"avx512_vnni emulated", run_emulated<&kAvx512VnniDot_emulated>, Isa::avx2, 16, 16, ""},
      {"avx512_dot8 emulated", run_emulated<&kAvx512Dot8_emulated>, Isa::avx2, 16, 8, ""},
      {"avx512_dot emulated", run_emulated<&kAvx512Dot_emulated>, Isa::avx2, 16, 16, ""},
      {"avx512 emulated", run_emulated<nullptr>, Isa::avx2, 32, 32, ""}};
  for (const GemmVariant& v : emulated)
    if (v.available()) rows.push_back(&v);
#endif
  if (rows.empty()) mark_skipped("this CPU has no AVX2");
  return rows;
}

// True for a row whose bf16 products round activations to bf16.
inline bool rounds_bf16(const GemmVariant& row) { return std::string(row.name).starts_with("avx512_bf16"); }

inline float random_value(Random& random) { return float(random.uniform() * 2 - 1); }

// Groups whose members are scattered over K, as GPTQ's desc_act leaves them.
inline QuantGroups scattered(int k, int size, uint64_t seed = 5) {
  QuantGroups groups = even_groups(k, size);
  Random random(seed);
  for (size_t i = groups.of.size(); i > 1; --i) std::swap(groups.of[i - 1], groups.of[random.below(i)]);
  return groups;
}

// A dense or quantised matrix, and the values that it stands for.
struct Problem {
  int n = 0, k = 0, groups = 1;
  Dtype dtype = Dtype::f32;
  std::vector<QuantRow> rows = {};  // if quantised
  std::vector<float> w = {};        // [n, k], already rounded to dtype
  std::vector<float> bias = {};
  PackedMatrix packed = {};
};

// quant: the groups of a quantised matrix.
inline Problem make_problem(int n, int k, int groups, Dtype dtype, ThreadTeam& team, uint64_t seed = 1,
                            const QuantGroups& quant = {}) {
  Problem p{.n = n, .k = k, .groups = groups, .dtype = dtype};
  Random random(seed);
  p.w.resize(size_t(n) * size_t(k));
  for (float& w : p.w) {
    w = random_value(random);
    if (dtype == Dtype::bf16) w = to_f32(to_bf16(w));
    if (dtype == Dtype::f16) w = f16_to_f32(nearest_f16(w));
  }
  p.bias.resize(size_t(n));
  for (float& b : p.bias) b = random_value(random);
  if (is_quantised(dtype)) {
    for (int row = 0; row < n; ++row) {
      QuantRow& made = p.rows.emplace_back(dtype, k, quant.count);
      float* w = p.w.data() + size_t(row) * size_t(k);
      for (int i = 0; i < k; ++i) w[i] = w[i] * (row % 3 ? 1.0f : 1e-3f) + (row % 5 ? 0 : 0.25f);
      REQUIRE(quantise_row(dtype, quant, w, made));
      widen_row(dtype, quant, made, w);
    }
    p.packed = pack_codes(
        n, k, groups, dtype, quant, [&](int row, QuantRow& out) { out = p.rows[size_t(row)]; }, team);
  } else {
    p.packed = pack_matrix(
        n, k, groups, dtype,
        [&](int row, float* out) { std::memcpy(out, p.w.data() + size_t(row) * size_t(k), size_t(k) * 4); }, team);
  }
  return p;
}

// Random values, some of them large.
inline std::vector<float> random_rows(int m, int stride, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(size_t(m) * size_t(stride));
  for (float& v : x) v = random_value(random) * (random.below(20) ? 1.0f : 30.0f);
  return x;
}

constexpr float kSentinel = 12345.0f;

// Returns y [m, n]. Its row stride is n + 3, and the three floats behind each row must survive.
inline std::vector<float> run(const GemmVariant& variant, const Problem& p, const std::vector<float>& x, int m,
                              int x_stride, bool with_bias, ThreadTeam& team, size_t first_row = 0) {
  GemmScratch scratch(m, p.packed.stored({0, p.groups}), team.size());
  int stride = p.n + 3;
  std::vector<float> y(size_t(m) * size_t(stride), kSentinel);
  variant.run({.x = x.data() + first_row * size_t(x_stride),
               .y = y.data(),
               .w = &p.packed,
               .bias = with_bias ? p.bias.data() : nullptr,
               .m = m,
               .x_stride = x_stride,
               .y_stride = stride},
              scratch, team);
  std::vector<float> out;
  for (int r = 0; r < m; ++r) {
    auto row = y.begin() + long(r) * stride;
    out.insert(out.end(), row, row + p.n);
    for (int c = p.n; c < stride; ++c) REQUIRE(row[c] == kSentinel);
  }
  return out;
}

}  // namespace xpyd::testing
