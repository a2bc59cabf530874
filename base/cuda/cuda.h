// CUDA's host side as this project uses it: streams, events, graphs, memory, launches.
//
// The specification has two implementations: base/cuda/cuda.cu and base/cuda/cuda_driver.cu over CUDA, and tests/simt
// over an interpreter that runs the same kernels on the CPU, so that `make test` executes them without a GPU. Sources
// that include this file are *.cu. nvcc compiles them for the first, the host compiler with -DXPYD_SIMT for the second.
//
// A failed call is a broken device or a bug of ours. It aborts with the call and CUDA's message; a kernel's fault
// aborts a later call, such as a wait. open() and allocations of memory may fail normally and return an Error. No work
// is on the default stream, streams do not wait for it, and there is no managed memory. Work on a stream is done in
// order.
//
// Thread safety: a Stream, and what is recorded on it, belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"

#ifdef XPYD_SIMT
#include "simt.h"
#else
#include <cuda_runtime.h>
#endif

namespace xpyd::cuda {

// The card in use: device 0 of those that CUDA_VISIBLE_DEVICES leaves.
struct Card {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int n_sms = 0;
  size_t memory_bytes = 0, free_bytes = 0;
  int max_shared_bytes = 0;     // dynamic shared memory of one thread block, opted in
  int driver = 0, runtime = 0;  // 13000 is 13.0
};
// Error: no driver, a driver that is too old, no card, or compute capability below 8.0. The message says what is
// needed.
Result<Card> open();

class Stream {
 public:
  explicit Stream(bool high_priority = false);
  ~Stream();
  Stream(const Stream&) = delete;
  void wait();  // blocks until everything on it is done
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

// A point on a stream.
class Event {
 public:
  explicit Event(bool timing = false);
  ~Event();
  Event(const Event&) = delete;
  void record(Stream& stream);
  bool done() const;                // true if everything before the recorded point is done, or if never recorded
  void wait() const;                // the calling thread waits
  void hold(Stream& stream) const;  // later work on `stream` waits; the caller does not
  static double seconds(const Event& begin, const Event& end);  // requires that both have timing and are done
 private:
  cudaEvent_t handle_ = nullptr;
};

// Work that is captured once and launched many times with the same addresses.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept { *this = std::move(other); }
  Graph& operator=(Graph&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  // body() enqueues on `stream`; nothing runs yet. It must not wait or allocate. The result is empty if the card has no
  // memory left for the graph.
  template <class F>
  static Graph capture(Stream& stream, F&& body) {
    begin_capture(stream);
    body();
    return end_capture(stream);
  }
  void launch(Stream& stream) const;
  explicit operator bool() const { return handle_ != nullptr; }

 private:
  static void begin_capture(Stream& stream);
  static Graph end_capture(Stream& stream);
  void* handle_ = nullptr;
};

// Memory that frees itself. Device memory is not zeroed. Pinned memory is host memory from which copies overlap.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(pinned_, other.pinned_);
    return *this;
  }
  static Result<Memory> device(size_t bytes);      // error `unavailable`: out of device memory
  static Memory pinned(size_t bytes);              // small buffers for copies; aborts if the host has no memory
  static Result<Memory> try_pinned(size_t bytes);  // error `unavailable`: the host has not enough
  size_t size() const { return bytes_; }
  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  static Result<Memory> allocate(size_t bytes, bool pinned);
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  bool pinned_ = false;
};

// Between any two memories, in stream order. Host memory must be pinned, and must not change until the copy is done.
void copy(void* destination, const void* source, size_t bytes, Stream& stream);
void fill(void* destination, int byte, size_t bytes, Stream& stream);

struct Shape {
  dim3 grid = 1, block = 1;
  size_t shared_bytes = 0;  // dynamic
};

void launch_kernel(const void* kernel, const char* name, const Shape& shape, void** args, Stream& stream);

// Launches one kernel. Arguments are converted to the kernel's parameter types and passed by value.
template <class... P, class... A>
void launch(void (*kernel)(P...), const char* name, const Shape& shape, Stream& stream, A&&... args) {
#ifdef XPYD_SIMT
  auto run = [kernel, ... values = static_cast<std::decay_t<P>>(args)] { kernel(values...); };
  simt::launch(name, shape.grid, shape.block, shape.shared_bytes, stream.handle(), run);
#else
  auto pass = [&](auto... value) {
    void* addresses[] = {&value..., nullptr};
    launch_kernel(reinterpret_cast<const void*>(kernel), name, shape, addresses, stream);
  };
  pass(static_cast<std::decay_t<P>>(args)...);
#endif
}

// While one thread captures a graph, other threads may do everything except wait for the whole card: that fails and
// breaks the capture. So a capture, from beginning to end, and vmm::wait_for_card() hold this mutex.
inline std::mutex& capturing() {
  static std::mutex mutex;
  return mutex;
}

// An array in device memory as the copy engine of sm_90 sees it (PTX ISA, "Tensor-map"): a matrix of bf16, of which it
// copies boxes, 64 columns wide, to shared memory.
//
// Each row of a box becomes 128 bytes in shared memory. Of the row at address 128 r, the 16-byte piece p is at place p
// xor (r mod 8): the 128-byte swizzle, which wgmma undoes. Rows and columns outside of the matrix arrive as zeros.
constexpr int kBoxColumns = 64;

// A kernel's parameter, `const __grid_constant__`. Opaque: CUtensorMap on a card.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

struct BoxedMatrix {
  const void* data = nullptr;  // device memory, aligned to 16 bytes
  size_t rows = 0, columns = 0;
  size_t row_stride = 0;  // bytes, a multiple of 16
  int box_rows = 0;       // 1 to 256
};
// A pure computation, legal inside a capture. Needs a driver for CUDA 12.0 or later.
TensorMap make_tensor_map(const BoxedMatrix& matrix);

}  // namespace xpyd::cuda
