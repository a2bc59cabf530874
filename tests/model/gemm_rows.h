// Rows of kernels: those of the program's tables that run here; and AVX-512's as every processor with AVX2 executes
// them, over which the same tests run as [emulated], hidden.
#pragma once

#include <vector>

#include "model/gemm.h"
#include "model/gemm_kernels.h"
#include "tests/catch.h"

namespace xpyd::model {
#if defined(__x86_64__)
extern const GemmKernels kAvx512Kernels_emulated;
extern const DotKernels kAvx512Dot_emulated, kAvx512VnniDot_emulated, kAvx512Bf16Dot_emulated;
#endif
}  // namespace xpyd::model

// TEST_ROWS(function, name, tags, here, emulated) { ... rows ... }: twice, over what each of the two gives.
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
      {"avx512_bf16 emulated", run_emulated<&kAvx512Bf16Dot_emulated>, Isa::avx2, false, ""},
      {"avx512_vnni emulated", run_emulated<&kAvx512VnniDot_emulated>, Isa::avx2, false, ""},
      {"avx512_dot emulated", run_emulated<&kAvx512Dot_emulated>, Isa::avx2, false, ""},
      {"avx512 emulated", run_emulated<nullptr>, Isa::avx2, true, ""}};
  for (const GemmVariant& v : emulated)
    if (v.available()) rows.push_back(&v);
#endif
  if (rows.empty()) mark_skipped("this CPU has no AVX2");
  return rows;
}

// A row whose bf16 products round activations to bf16.
inline bool rounds_bf16(const GemmVariant& row) { return std::string(row.name).starts_with("avx512_bf16"); }

}  // namespace xpyd::testing
