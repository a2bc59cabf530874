// Host memory that does not move: page aligned, transparent huge pages asked for, touched when made
// so that no page fault happens later.
#pragma once

#include <cstddef>
#include <utility>

namespace xpyd {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // zeroed; where there is no memory: std::bad_alloc, as `new`
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

}  // namespace xpyd
