#include "base/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/copy.h"

namespace xpyd {
namespace {

// Returns 0 if unknown.
size_t available_bytes() {
  unsigned long kib = 0;
  if (std::FILE* file = std::fopen("/proc/meminfo", "r")) {
    char line[128];
    while (std::fgets(line, sizeof line, file))
      if (std::sscanf(line, "MemAvailable: %lu kB", &kib) == 1) break;
    std::fclose(file);
  }
  return size_t(kib) << 10;
}

std::atomic<HugePages> pages_of_process = HugePages::transparent;

}  // namespace

void use_huge_pages(HugePages pages) { pages_of_process = pages; }
HugePages huge_pages() { return pages_of_process; }

void ask_for_pages(void* at, size_t bytes) {
  madvise(at, bytes, huge_pages() == HugePages::off ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
}

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw Error{ErrorCode::unavailable, "no memory for " + std::to_string(bytes) + " bytes"};
  data_ = static_cast<std::byte*>(p);
  ask_for_pages(p, bytes);
  for (size_t i = 0; i < bytes; i += 4096) reinterpret_cast<volatile char*>(data_)[i] = 0;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

Status check_available_memory(size_t bytes) {
  if (const size_t there = available_bytes(); there > 0 && bytes > there)
    return Error{ErrorCode::unavailable, std::to_string(bytes) + " bytes: this machine has only " +
                                             std::to_string(there) + " bytes of memory left"};
  return ok();
}

#if defined(__x86_64__)
void copy_streaming_avx2(const Copy* copies, size_t n);    // copy_avx2.cc
void copy_streaming_avx512(const Copy* copies, size_t n);  // copy_avx512.cc
#endif

std::span<const CopyVariant> copy_variants() {
  static constexpr CopyVariant kVariants[] = {
#if defined(__x86_64__)
    {"avx512", copy_streaming_avx512, Isa::avx512},
    {"avx2", copy_streaming_avx2, Isa::avx2},
#endif
    {"portable",
     [](const Copy* copies, size_t n) {
       for (const Copy* copy = copies; copy < copies + n; ++copy)
         if (copy->bytes > 0) std::memcpy(copy->destination, copy->source, copy->bytes);
     },
     Isa::portable}
  };
  return kVariants;
}

void copy_streaming(std::span<const Copy> copies) {
  static const CopyVariant& best = best_row(copy_variants());
  best.run(copies.data(), copies.size());
}

}  // namespace xpyd
