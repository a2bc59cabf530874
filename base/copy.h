// Copies inside host memory that bypass the caches.
#pragma once

#include <cstddef>
#include <span>

#include "base/cpu.h"

namespace xpyd {

struct Copy {
  const std::byte* source = nullptr;
  std::byte* destination = nullptr;
  size_t bytes = 0;
};

// Copies with non-temporal stores, which do not read the lines of `destination` before they are overwritten. This pays
// if the bytes exceed the last-level cache, or if the next reader is another socket or nobody. memcpy is better for
// bytes that are read again soon. The call ends with a fence for these stores, so a release store afterwards publishes
// the bytes. It fetches the head of the next copy during the current one, because the hardware prefetcher starts anew
// at each jump. Without AVX2 it is memcpy, without a fence.
void copy_streaming(std::span<const Copy> copies);

// The variants of which copy_streaming() takes the best that this CPU runs.
struct CopyVariant {
  const char* name;
  void (*run)(const Copy* copies, size_t n);
  Isa needs;
};
std::span<const CopyVariant> copy_variants();

}  // namespace xpyd
