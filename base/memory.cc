#include "base/memory.h"

#include <sys/mman.h>

#include "base/out_of_memory.h"

namespace xpyd {

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p;
  while ((p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) == MAP_FAILED)
    out_of_memory(bytes);
  data_ = static_cast<std::byte*>(p);
  madvise(p, bytes, MADV_HUGEPAGE);  // a hint: refused on some kernels, and then 4 KiB pages do
  for (size_t i = 0; i < bytes; i += 4096) reinterpret_cast<volatile char*>(data_)[i] = 0;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace xpyd
