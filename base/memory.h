// Host memory: taken, asked about, and run out of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"

namespace xpyd {

// The pages of a process's memory of 2 MiB and more, where it holds weights, KV and scratch: small ones, or huge ones
// as far as the kernel has them.
enum class HugePages : uint8_t { off, transparent };
void use_huge_pages(HugePages pages);  // before such memory is made; `transparent` where nobody calls it
HugePages huge_pages();
// A hint, for memory that is mapped and not yet touched.
void ask_for_pages(void* at, size_t bytes);

// Memory that does not move: page aligned, in huge_pages(), touched when made so that no page fault happens later.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // zeroed; out_of_memory() where the machine has none
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

// Whether this machine has memory, asked before it is touched: afterwards the kernel ends a program
// where a message was due. Error `unavailable`: it has not that much left (MemAvailable).
Status check_available_memory(size_t bytes);

// What becomes of a process that gets no memory: one line on stderr, and exit code 1. A server or a
// worker is told to end (SIGTERM, which its signal thread takes), with a reserve to do it in; where
// that is not enough, or nobody takes the signal, the process ends at once.
//
// Before there is another thread.
void prepare_for_out_of_memory();
// Whoever gets none from the system does what `new` does: asks for help, then tries again.
// `bytes`: as many as were asked for; 0: not known.
void out_of_memory(size_t bytes);
bool was_out_of_memory();  // since the start

}  // namespace xpyd
