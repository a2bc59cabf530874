#include "base/memory.h"

#include <sys/mman.h>

#include <string>

#include "base/status.h"

namespace xpyd {

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  XPYD_CHECK(p != MAP_FAILED, "no memory for " + std::to_string(bytes) + " bytes");
  data_ = static_cast<std::byte*>(p);
  madvise(p, bytes, MADV_HUGEPAGE);  // a hint: refused on some kernels, and then 4 KiB pages do
  for (size_t i = 0; i < bytes; i += 4096) reinterpret_cast<volatile char*>(data_)[i] = 0;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace xpyd
