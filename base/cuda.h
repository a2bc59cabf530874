// What this project uses of CUDA on the host side: streams, events, graphs, memory, launches.
//
// The specification has two implementations: base/cuda.cu over the CUDA runtime, and
// tests/simt/cuda_simt.cc over an interpreter that runs the same kernels on the CPU, so that they
// are executed by `make test` where there is no GPU. Sources that include this file are *.cu: nvcc
// compiles them for the first, the host compiler with -DXPYD_SIMT for the second.
//
// A failed call is a broken device or a bug of ours and aborts with the call and CUDA's message;
// the exceptions are open() and device memory, where failure is a normal outcome. There is no
// default stream and no managed memory. Everything on a stream happens in order.
//
// Thread safety: a Stream, and what is recorded on it, belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
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
  int max_shared_bytes = 0;     // dynamic shared memory of one block, opted in
  int driver = 0, runtime = 0;  // as 13000
};
// Error: no driver, a driver that is too old, no card, compute capability below 8.0; says what is
// needed.
Result<Card> open();

class Stream {
 public:
  explicit Stream(bool high_priority = false);
  explicit Stream(cudaStream_t handle) : handle_(handle) {}  // takes it over
  ~Stream();
  Stream(const Stream&) = delete;
  void wait();  // until everything on it is done
  bool done() const;
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
  bool done() const;                // everything before the recorded point is done; true when never recorded
  void wait() const;                // the caller's thread waits
  void hold(Stream& stream) const;  // later work on `stream` waits, the caller does not
  static double seconds(const Event& begin, const Event& end);  // both with timing, both done
 private:
  cudaEvent_t handle_ = nullptr;
};

// Work captured once, launched many times with the same addresses.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept { *this = std::move(other); }
  Graph& operator=(Graph&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  // body() enqueues on `stream`; nothing runs yet. Inside, no waiting and no allocation. Empty
  // where the card has no memory left for it.
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

// Memory that frees itself. Device: not touched, not zeroed. Pinned: host memory that copies
// overlap from.
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
  static Memory pinned(size_t bytes);              // small: what copies go through
  static Result<Memory> try_pinned(size_t bytes);  // error `unavailable`: the host has not that much
  size_t size() const { return bytes_; }
  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  bool pinned_ = false;
};

// Between any two memories, in stream order. Host memory must be pinned, and stay as it is until
// then.
void copy(void* destination, const void* source, size_t bytes, Stream& stream);
void fill(void* destination, int byte, size_t bytes, Stream& stream);

struct Shape {
  dim3 grid = 1, block = 1;
  size_t shared_bytes = 0;  // dynamic
};

void launch_kernel(const void* kernel, const char* name, const Shape& shape, void** args, Stream& stream);

// One kernel. Arguments are converted to the kernel's parameter types and passed by value.
template <class... P, class... A>
void launch(void (*kernel)(P...), const char* name, const Shape& shape, Stream& stream, A&&... args) {
#ifdef XPYD_SIMT
  simt::launch(name, shape.grid, shape.block, shape.shared_bytes, stream.handle(),
               [kernel, ... values = static_cast<std::decay_t<P>>(args)] { kernel(values...); });
#else
  std::tuple<std::decay_t<P>...> values(static_cast<std::decay_t<P>>(args)...);
  std::apply(
      [&](auto&... value) {
        void* addresses[] = {&value...};
        launch_kernel(reinterpret_cast<const void*>(kernel), name, shape, addresses, stream);
      },
      values);
#endif
}

// CUDA allows other threads everything while one captures a graph, but to wait for the whole card:
// that fails and spoils the capture. So who captures and who waits for the card take turns.
// Held from the beginning to the end of a capture, and by vmm::wait_for_card().
inline std::mutex& capturing() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace xpyd::cuda
