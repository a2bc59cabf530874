// The instruction sets for which kernels are written, and which of them this processor has. Every table of CPU kernels
// names what each row needs, and gets its best row here.
//
// Thread safety: limit_isa() must be called before any kernel is chosen; the others may be called from any thread.
#pragma once

#include <cstdint>
#include <iterator>

namespace xpyd {

// Each instruction set includes those before it, so they have an order; every processor with bf16 has vnni. The
// Makefile has the compiler's flags for each (*_avx2.cc, *_avx512.cc, *_avx512vnni.cc, *_avx512bf16.cc).
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

// Returns a feature that `isa` needs and this processor lacks, named as in /proc/cpuinfo, or "".
const char* cpu_lacks(Isa isa);
// True if this processor has `isa` and limit_isa() allows it.
bool cpu_has(Isa isa);
// Treats every newer instruction set as if the processor lacked it (--cpu-kernels).
void limit_isa(Isa highest);

// Returns the row with the newest instruction set that runs here, the first of several. Requires a portable row.
template <class Rows>
const auto& best_row(const Rows& rows) {
  const auto* best = &*std::begin(rows);
  for (const auto& row : rows)
    if (cpu_has(row.needs) && (row.needs > best->needs || !cpu_has(best->needs))) best = &row;
  return *best;
}

}  // namespace xpyd
