// The words of CUDA that kernels here use, for the host compiler: qualifiers, vector types, types of built-in
// variables, and scalar functions. simt.h has what needs a warp, a block or a barrier.
#pragma once

#include <math.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
// `__shared__` is missing on purpose: shared memory that Carver does not allocate would not be checked.

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// These are macros because the C library declares functions of these names.
#define __expf ::expf
#define rsqrtf ::xpyd::cuda::simt::reciprocal_sqrt
namespace xpyd::cuda::simt {
inline float reciprocal_sqrt(float x) { return 1.0f / ::sqrtf(x); }
template <class T>
inline std::atomic_ref<T> global(T* p) {
  return std::atomic_ref<T>(*p);
}
}  // namespace xpyd::cuda::simt

template <std::integral T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <std::integral T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
constexpr float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
constexpr int __popc(unsigned x) { return std::popcount(x); }
constexpr int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }

template <class T>
inline T __ldcg(const T* p) {
  return *p;
}

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
// Atomics on global memory. Two host threads may run kernels at once. There are none on shared memory.
#define XPYD_SIMT_ATOMIC(name, expression)                          \
  template <class T>                                                \
  inline T name(T* p, std::type_identity_t<T> value) {              \
    auto place = ::xpyd::cuda::simt::global(p);                     \
    T old = place.load();                                           \
    while (!place.compare_exchange_weak(old, expression)) continue; \
    return old;                                                     \
  }
XPYD_SIMT_ATOMIC(atomicAdd, T(old + value))
XPYD_SIMT_ATOMIC(atomicMax, (old < value ? value : old))
#undef XPYD_SIMT_ATOMIC
