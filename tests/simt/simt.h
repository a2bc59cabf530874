// A SIMT machine on the CPU, included by base/cuda/cuda.h under -DXPYD_SIMT. Kernels become plain functions and every
// CUDA thread a fibre. Joint operations of threads (barriers, warp collectives, shared memory) are checked. README.md
// says what a clean run proves and what it does not.
//
// Thread safety: each host thread has its own machine, and several may launch at once.
#pragma once

#include <concepts>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "cuda_words.h"

namespace xpyd::cuda::simt {

#ifdef __cpp_lib_source_location
using Where = std::source_location;
#else  // clang before 15
class Where {
 public:
  constexpr Where() = default;
  static constexpr Where current(const char* file = __builtin_FILE(), uint32_t line = __builtin_LINE(),
                                 uint32_t column = __builtin_COLUMN()) {
    Where here;
    here.file_ = file, here.line_ = line, here.column_ = column;
    return here;
  }
  constexpr const char* file_name() const { return file_; }
  constexpr uint32_t line() const { return line_; }
  constexpr uint32_t column() const { return column_; }

 private:
  const char* file_ = "";
  uint32_t line_ = 0, column_ = 0;
};
#endif

// While it lives, it keeps the faults of this host thread's launches, and a fault abandons only its launch. Otherwise a
// fault prints itself and aborts.
class FaultCatcher {
 public:
  FaultCatcher();
  ~FaultCatcher();
  FaultCatcher(const FaultCatcher&) = delete;
  const std::vector<std::string>& faults() const { return faults_; }
  void add(std::string fault) { faults_.push_back(std::move(fault)); }

 private:
  FaultCatcher* outer_;
  std::vector<std::string> faults_;
};

// Reports a fault outside a kernel (a wrong copy, a wait inside a capture).
void host_fault(const std::string& what);

// --- Launching.

using Body = void (*)(const void* context);  // what one thread runs

void run_grid(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Body body, const void* context);
bool keeps_work(cudaStream_t stream);  // true while capturing, or if streams are late
void keep(cudaStream_t stream, std::function<void()> work);

// On late streams, work runs only when something waits for it, at the last moment that CUDA allows. So a missing wait
// or a missing order between streams shows as wrong data. By default work runs at once. Switching late streams off runs
// what is left.
void set_late_streams(bool late);

template <class F>
void launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, F body) {
  auto run = [=] {
    run_grid(
        name, grid, block, shared_bytes, [](const void* f) { (*static_cast<const F*>(f))(); }, &body);
  };
  if (keeps_work(stream))
    keep(stream, run);
  else
    run();
}

// Device memory (cuda_simt.cc).
void set_device_memory_limit(size_t bytes);  // of all live Memory::device together; 0: the default again
bool is_device_memory(const void* begin, size_t bytes);

// --- The running thread.

struct BlockShape {
  uint3 index;
  dim3 dim, grid;
};
struct Thread {
  uint3 index;
  const BlockShape* block;
};
inline constinit thread_local Thread* self = nullptr;

#define threadIdx (::xpyd::cuda::simt::self->index)
#define blockIdx (::xpyd::cuda::simt::self->block->index)
#define blockDim (::xpyd::cuda::simt::self->block->dim)
#define gridDim (::xpyd::cuda::simt::self->block->grid)

// --- Barriers and warp collectives.

void sync_threads(Where where);

enum class Collective { syncwarp, shuffle, shuffle_up, shuffle_xor, ballot, ldmatrix, mma };
void sync_warp(unsigned mask, Where where);
uint64_t shuffle(Collective kind, unsigned mask, uint64_t bits, int argument, Where where);
unsigned ballot(unsigned mask, bool predicate, Where where);

template <class T>
T shuffle_value(Collective kind, unsigned mask, T value, int argument, Where where) {
  static_assert(std::is_arithmetic_v<T>, "CUDA shuffles scalars of 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle(kind, mask, bits, argument, where);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// --- Shared memory.

std::byte* shared_base();
// Each checks bounds, initialisation and races of the bytes that the running thread touches.
void check_read(const void* place, size_t bytes, Where where);
void check_write(const void* place, size_t bytes, Where where);
[[noreturn]] void index_fault(long long index, long long count, long long n, size_t element_bytes, Where where);

// An index that remembers its source line.
struct Index {
  long long value;
  Where where;
  template <std::integral I>
  Index(I i, Where w = Where::current()) : value((long long)(i)), where(w) {}
};

// array[i]: conversion reads it and assignment writes it. It is usable once, so that `auto x = array[i]` cannot quietly
// become a later read.
template <class T>
class Element {
 public:
  Element(T* place, Where where) : place_(place), where_(where) {}
  operator T() const&& { return load(); }
  T operator=(T value) && { return store(value); }
  T operator=(Element&& other) && { return store(other.load()); }

 private:
  T load() const {
    check_read(place_, sizeof(T), where_);
    T value;
    std::memcpy(&value, place_, sizeof value);
    return value;
  }
  T store(T value) const {
    check_write(place_, sizeof(T), where_);
    std::memcpy(place_, &value, sizeof value);
    return value;
  }
  T* place_;
  Where where_;
};

template <class T>
struct Shared {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) % 2 == 0, "races are tracked per two bytes");
  T* data;
  int n;  // elements
  Element<T> operator[](Index i) const { return {place(i, 1), i.where}; }
  Shared at(Index i, int count) const {
    if (count < 0 || i.value < 0 || i.value + count > n) index_fault(i.value, count, n, sizeof(T), i.where);
    return {data + i.value, count};
  }
  T* place(Index i, int count) const {  // checked
    if (i.value < 0 || i.value + count > n) index_fault(i.value, count, n, sizeof(T), i.where);
    return data + i.value;
  }
};

template <class T>
constexpr int elements_of_16_bytes() {
  static_assert(16 % sizeof(T) == 0);
  return int(16 / sizeof(T));
}
void check_aligned(const void* place, size_t bytes, const char* what, Where where);

template <class T>
uint4 load_16(const Shared<T>& from, Index i) {
  const T* place = from.place(i, elements_of_16_bytes<T>());
  check_aligned(place, 16, "load_16", i.where);
  check_read(place, 16, i.where);
  uint4 value;
  std::memcpy(&value, place, 16);
  return value;
}
template <class T>
void store_16(const Shared<T>& to, Index i, uint4 value) {
  T* place = to.place(i, elements_of_16_bytes<T>());
  check_aligned(place, 16, "store_16", i.where);
  check_write(place, 16, i.where);
  std::memcpy(static_cast<void*>(place), &value, 16);
}

void copy_16_async(std::byte* to, const void* from, bool valid, Where where);
template <class T>
void cp_async_16(const Shared<T>& to, Index i, const void* from, bool valid = true) {
  copy_16_async(reinterpret_cast<std::byte*>(to.place(i, elements_of_16_bytes<T>())), from, valid, i.where);
}
void cp_async_commit();
void copy_async_wait(int n_under_way);
template <int N>
void cp_async_wait() {
  copy_async_wait(N);
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, Where where);
inline void ldmatrix_x4(uint32_t (&r)[4], const Shared<bf16>& from, Index i) {
  load_matrices(r, from.place(i, 8), false, i.where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const Shared<bf16>& from, Index i) {
  load_matrices(r, from.place(i, 8), true, i.where);
}
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Where where = Where::current());

}  // namespace xpyd::cuda::simt

#include "sm90.h"

// --- CUDA's names for these.

#define XPYD_SIMT_WHERE ::xpyd::cuda::simt::Where where = ::xpyd::cuda::simt::Where::current()

inline void __syncthreads(XPYD_SIMT_WHERE) { ::xpyd::cuda::simt::sync_threads(where); }
inline void __syncwarp(unsigned mask = 0xffffffffu, XPYD_SIMT_WHERE) { ::xpyd::cuda::simt::sync_warp(mask, where); }
#define XPYD_SIMT_SHUFFLE(name, kind)                                                                             \
  template <class T>                                                                                              \
  inline T name(unsigned mask, T value, int argument, XPYD_SIMT_WHERE) {                                          \
    return ::xpyd::cuda::simt::shuffle_value(::xpyd::cuda::simt::Collective::kind, mask, value, argument, where); \
  }
XPYD_SIMT_SHUFFLE(__shfl_sync, shuffle)
XPYD_SIMT_SHUFFLE(__shfl_up_sync, shuffle_up)
XPYD_SIMT_SHUFFLE(__shfl_xor_sync, shuffle_xor)
#undef XPYD_SIMT_SHUFFLE
inline unsigned __ballot_sync(unsigned mask, int predicate, XPYD_SIMT_WHERE) {
  return ::xpyd::cuda::simt::ballot(mask, predicate, where);
}
inline int __any_sync(unsigned mask, int predicate, XPYD_SIMT_WHERE) {
  return ::xpyd::cuda::simt::ballot(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, XPYD_SIMT_WHERE) {
  return ::xpyd::cuda::simt::ballot(mask, predicate, where) == mask;
}
#undef XPYD_SIMT_WHERE
