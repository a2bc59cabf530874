#include "base/available_memory.h"

#include <cstdio>
#include <string>

namespace xpyd {
namespace {

// 0: unknown.
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

}  // namespace

Status check_available_memory(size_t bytes) {
  if (const size_t there = available_bytes(); there > 0 && bytes > there)
    return Error{ErrorCode::unavailable,
                 std::to_string(bytes) + " bytes: this machine has " + std::to_string(there) + " bytes of memory left"};
  return ok();
}

}  // namespace xpyd
