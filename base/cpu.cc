#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>

namespace xpyd {
namespace {

std::atomic<Isa> isa_limit{Isa::avx512_bf16};

}  // namespace

#if defined(__x86_64__)
namespace {

// clang 14 does not know "f16c" in __builtin_cpu_supports().
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

const char* cpu_lacks(Isa isa) {
#if defined(__x86_64__)
#define XPYD_FEATURE(of, name) \
  { Isa::of, name, __builtin_cpu_supports(name) != 0 }
  const struct {
    Isa of;
    const char* name;
    bool there;
  } features[] = {XPYD_FEATURE(avx2, "avx2"),
                  XPYD_FEATURE(avx2, "fma"),
                  {Isa::avx2, "f16c", has_f16c()},
                  XPYD_FEATURE(avx512, "avx512f"),
                  XPYD_FEATURE(avx512, "avx512bw"),
                  XPYD_FEATURE(avx512, "avx512vl"),
                  XPYD_FEATURE(avx512, "avx512dq"),
                  XPYD_FEATURE(avx512_vnni, "avx512vnni"),
                  XPYD_FEATURE(avx512_bf16, "avx512bf16")};
#undef XPYD_FEATURE
  for (const auto& feature : features)
    if (feature.of <= isa && !feature.there) return feature.name;
  return "";
#else
  return isa == Isa::portable ? "" : "x86-64";
#endif
}

bool cpu_has(Isa isa) { return isa <= isa_limit && !*cpu_lacks(isa); }

void limit_isa(Isa highest) { isa_limit = highest; }

}  // namespace xpyd
