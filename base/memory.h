// Host memory: buffers, huge pages, and available memory.
//
// Thread safety: any thread, except where a call says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"

namespace xpyd {

// The page size of this process's large memory, which holds weights, KV and scratch: small pages, or huge pages as far
// as the kernel has them.
enum class HugePages : uint8_t { off, transparent };
void use_huge_pages(HugePages pages);  // before such memory is made; the default is `transparent`
HugePages huge_pages();
// Asks the kernel for huge_pages() for memory that is mapped and not yet touched. It is a hint.
void ask_for_pages(void* at, size_t bytes);

// Memory that does not move: page aligned, in huge_pages(), touched when it is made, so that no page fault happens
// later.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // zeroed; throws an Error if the machine has none
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Tests whether this machine has `bytes` of memory left (MemAvailable), before they are touched; afterwards the kernel
// would kill the program without a message. Error `unavailable`: it has not.
Status check_available_memory(size_t bytes);

}  // namespace xpyd
