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
#include <functional>
#include <memory>
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
  explicit Stream(cudaStream_t handle) : handle_(handle) {}  // takes ownership
  ~Stream();
  Stream(const Stream&) = delete;
  void wait();  // blocks until everything on it is done
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

// A stream, and whether kernels may start early on it (wait_for_previous()). A stream alone means no.
struct On {
  On(Stream& s, bool may_start_early = false) : stream(s), early(may_start_early) {}
  Stream& stream;
  bool early;
};

void launch_kernel(const void* kernel, const char* name, const Shape& shape, void** args, const On& on);
#ifdef XPYD_SIMT
namespace simt {
void launch_early(const char* name, const Shape& shape, cudaStream_t stream, std::function<void()> body);
void wait_for_previous(Where where);
}  // namespace simt
#endif

// Launches one kernel. Arguments are converted to the kernel's parameter types and passed by value.
template <class... P, class... A>
void launch(void (*kernel)(P...), const char* name, const Shape& shape, const On& on, A&&... args) {
#ifdef XPYD_SIMT
  auto run = [kernel, ... values = static_cast<std::decay_t<P>>(args)] { kernel(values...); };
  if (on.early)
    simt::launch_early(name, shape, on.stream.handle(), run);
  else
    simt::launch(name, shape.grid, shape.block, shape.shared_bytes, on.stream.handle(), run);
#else
  auto pass = [&](auto... value) {
    void* addresses[] = {&value..., nullptr};
    launch_kernel(reinterpret_cast<const void*>(kernel), name, shape, addresses, on);
  };
  pass(static_cast<std::decay_t<P>>(args)...);
#endif
}

// Programmatic dependent launch (sm_90): a kernel starts while the one before it on the stream ends.
// wait_for_previous() holds it until all earlier work is done and visible. Every thread calls it before it touches
// memory that earlier work writes or reads, so if a kernel is done, all kernels before it are. let_next_start() lets
// the next kernel use the room that is left. Both do nothing if the kernel was not launched early, and below sm_90. In
// captured graphs these are programmatic edges (CUDA Programming Guide, "Programmatic Dependent Launch"). On the
// interpreter a thread block reaches its wait before the kernel before it has begun (tests/simt/README.md).
#ifdef XPYD_SIMT
inline void wait_for_previous(simt::Where where = simt::Where::current()) { simt::wait_for_previous(where); }
inline void let_next_start() {}
#else
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}
#endif

// For kernels that have nothing to do before the wait.
__device__ inline void begin_after_previous() {
  let_next_start();
  wait_for_previous();
}

// While one thread captures a graph, other threads may do everything except wait for the whole card: that fails and
// breaks the capture. So a capture, from beginning to end, and vmm::wait_for_card() hold this mutex.
inline std::mutex& capturing() {
  static std::mutex mutex;
  return mutex;
}

// A card's SMs cut in two: streams of one part cannot use SMs of the other (green contexts; CUDA 12.5 or later).
class Split {
 public:
  virtual ~Split() = default;
  // The first part gets n_sms, rounded up to what the card can cut (multiples of 8 on sm_90); the second part gets the
  // rest. Error `invalid_argument`: n_sms is not below the card's; `unavailable`: the driver is too old or cannot.
  static Result<std::unique_ptr<Split>> cut(const Card& card, int n_sms);
  // The number of SMs that work on this stream may use; 0: the whole card.
  static int n_sms_of(const Stream& stream);
  virtual int n_sms(int part) const = 0;
  // The caller owns the handle. No other call makes work on part 0 or 1.
  virtual cudaStream_t make_stream(int part, bool high_priority) = 0;
};

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
