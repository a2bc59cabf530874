// The rows of gemm's table that run here: those of the program, and AVX-512's as every processor with AVX2 executes them.
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

namespace xpyd::testing {

inline std::vector<const GemmVariant*> gemm_rows() {
  std::vector<const GemmVariant*> rows;
  for (const GemmVariant& v : gemm_variants())
    if (v.available())
      rows.push_back(&v);
    else if (v.needs <= Isa::avx2)
      mark_skipped(std::string(v.name) + " does not run on this CPU");
#if defined(__x86_64__)
  static const GemmVariant emulated[] = {
      {"avx512_bf16 emulated",
       [](const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
         run_gemm(args, scratch, team, kAvx512Kernels_emulated, &kAvx512Bf16Dot_emulated);
       },
       Isa::avx2, false, ""},
      {"avx512_vnni emulated",
       [](const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
         run_gemm(args, scratch, team, kAvx512Kernels_emulated, &kAvx512VnniDot_emulated);
       },
       Isa::avx2, false, ""},
      {"avx512_dot emulated",
       [](const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
         run_gemm(args, scratch, team, kAvx512Kernels_emulated, &kAvx512Dot_emulated);
       },
       Isa::avx2, false, ""},
      {"avx512 emulated",
       [](const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
         run_gemm(args, scratch, team, kAvx512Kernels_emulated, nullptr);
       },
       Isa::avx2, true, ""}};
  for (const GemmVariant& v : emulated)
    if (v.available()) rows.push_back(&v);
#endif
  return rows;
}

// A row whose bf16 products round activations to bf16.
inline bool rounds_bf16(const GemmVariant& row) { return std::string(row.name).starts_with("avx512_bf16"); }

}  // namespace xpyd::testing
