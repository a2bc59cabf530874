// The instruction sets that kernels are written for, and which of them this processor has. Every table of kernels for
// the CPU says of each row what it needs, and takes its best row from here.
//
// Thread safety: limit_isa() before anybody has chosen a kernel; the others from any thread.
#pragma once

#include <cstdint>
#include <iterator>

namespace xpyd {

// Each one includes those before it, so that "not above" has a meaning; every processor with bf16 has vnni. What they
// are to the compiler is in the Makefile (*_avx2.cc, *_avx512.cc, *_avx512vnni.cc, *_avx512bf16.cc).
enum class Isa : uint8_t { portable, avx2, avx512, avx512_vnni, avx512_bf16 };

struct IsaRow {
  const char* name;
  Isa needs;
};
inline constexpr IsaRow kIsas[] = {{"portable", Isa::portable},
                                   {"avx2", Isa::avx2},
                                   {"avx512", Isa::avx512},
                                   {"avx512_vnni", Isa::avx512_vnni},
                                   {"avx512_bf16", Isa::avx512_bf16}};

// What it needs that this processor lacks, by the name in /proc/cpuinfo; "": nothing.
const char* cpu_lacks(Isa isa);
// This processor has it, and it is within the limit.
bool cpu_has(Isa isa);
// Kernels that need more are from now on as if the processor lacked it (--cpu-kernels).
void limit_isa(Isa highest);

// The row that needs most of those that run here; the first of several. A table has a portable row.
template <class Rows>
const auto& best_row(const Rows& rows) {
  const auto* best = &*std::begin(rows);
  for (const auto& row : rows)
    if (cpu_has(row.needs) && (row.needs > best->needs || !cpu_has(best->needs))) best = &row;
  return *best;
}

}  // namespace xpyd
