// Copies inside host memory that go around the caches.
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

// Copies with non-temporal stores, which save reading the lines of `destination` before they are overwritten. It pays
// when the bytes copied together exceed the last-level cache, or when the destination is read next by nobody or by
// another socket; what is read again soon is better off with memcpy. Ends with a fence: a flag stored after the call
// publishes the bytes. The head of the next piece is fetched while one is copied: at a jump to another block the
// hardware prefetcher starts from nothing. Falls back to memcpy without AVX2.
void copy_streaming(std::span<const Copy> copies);

// What copy_streaming takes the best of.
struct CopyVariant {
  const char* name;
  void (*run)(const Copy* copies, size_t n);
  Isa needs;
};
std::span<const CopyVariant> copy_variants();

}  // namespace xpyd
