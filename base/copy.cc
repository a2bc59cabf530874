#include "base/copy.h"

#include <cstring>

namespace xpyd {

void copy_streaming_avx2(const Copy* copies, size_t n);  // copy_avx2.cc

void copy_streaming(std::span<const Copy> copies) {
#if defined(__x86_64__)
  static const bool have_avx2 = __builtin_cpu_supports("avx2");
  if (have_avx2) return copy_streaming_avx2(copies.data(), copies.size());
#endif
  for (const Copy& copy : copies)
    if (copy.bytes > 0) std::memcpy(copy.destination, copy.source, copy.bytes);
}

}  // namespace xpyd
