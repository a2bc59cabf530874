#include "base/memory.h"

#include <sys/mman.h>

#include <new>
#include <string>

namespace xpyd {
namespace {

class NoMemory final : public std::bad_alloc {
 public:
  explicit NoMemory(size_t bytes) : text_("no memory for " + std::to_string(bytes) + " bytes") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw NoMemory(bytes);
  data_ = static_cast<std::byte*>(p);
  madvise(p, bytes, MADV_HUGEPAGE);  // a hint: refused on some kernels, and then 4 KiB pages do
  for (size_t i = 0; i < bytes; i += 4096) reinterpret_cast<volatile char*>(data_)[i] = 0;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace xpyd
