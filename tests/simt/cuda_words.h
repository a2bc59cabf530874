// CUDA's words for the host compiler: qualifiers, vector types, the built-in variables' types,
// scalar functions. What needs a warp, a block or a barrier is in simt.h.
#pragma once

#include <math.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
// `__shared__` is missing on purpose: shared memory that is not cut by Carver would not be checked.

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

#define XPYD_SIMT_VECTORS(T, name)                              \
  struct alignas(2 * sizeof(T)) name##2 {                       \
    T x, y;                                                     \
  };                                                            \
  struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 { \
    T x, y, z, w;                                               \
  };                                                            \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; } \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
XPYD_SIMT_VECTORS(float, float)
XPYD_SIMT_VECTORS(double, double)
XPYD_SIMT_VECTORS(int, int)
XPYD_SIMT_VECTORS(unsigned, uint)
XPYD_SIMT_VECTORS(unsigned short, ushort)
#undef XPYD_SIMT_VECTORS
constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

inline constexpr int warpSize = 32;

// Macros, because the C library declares functions of these names.
#define __expf ::expf
#define __logf ::logf
#define __log2f ::log2f
#define __powf ::powf
#define __sinf ::sinf
#define __cosf ::cosf
#define rsqrtf ::xpyd::cuda::simt::reciprocal_sqrt
namespace xpyd::cuda::simt {
inline float reciprocal_sqrt(float x) { return 1.0f / ::sqrtf(x); }
template <class T>
inline std::atomic_ref<T> global(T* p) {
  return std::atomic_ref<T>(*p);
}
}  // namespace xpyd::cuda::simt

#define XPYD_SIMT_MIN_MAX(T)                          \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
XPYD_SIMT_MIN_MAX(int)
XPYD_SIMT_MIN_MAX(unsigned)
XPYD_SIMT_MIN_MAX(long)
XPYD_SIMT_MIN_MAX(unsigned long)
XPYD_SIMT_MIN_MAX(long long)
XPYD_SIMT_MIN_MAX(unsigned long long)
#undef XPYD_SIMT_MIN_MAX
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }

inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return ::sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? ::fminf(x, 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return int(::lrintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }
constexpr unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
constexpr int __float_as_int(float x) { return std::bit_cast<int>(x); }
constexpr float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
constexpr float __int_as_float(int x) { return std::bit_cast<float>(x); }
constexpr int __popc(unsigned x) { return std::popcount(x); }
constexpr int __popcll(unsigned long long x) { return std::popcount(x); }
constexpr int __clz(unsigned x) { return std::countl_zero(x); }
constexpr int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
constexpr unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }

// Loads and stores with a cache hint.
#define XPYD_SIMT_LOAD(name)  \
  template <class T>          \
  inline T name(const T* p) { \
    return *p;                \
  }
XPYD_SIMT_LOAD(__ldg)
XPYD_SIMT_LOAD(__ldca)
XPYD_SIMT_LOAD(__ldcg)
XPYD_SIMT_LOAD(__ldcs)
XPYD_SIMT_LOAD(__ldlu)
#undef XPYD_SIMT_LOAD
#define XPYD_SIMT_STORE(name)                             \
  template <class T>                                      \
  inline void name(T* p, std::type_identity_t<T> value) { \
    *p = value;                                           \
  }
XPYD_SIMT_STORE(__stwb)
XPYD_SIMT_STORE(__stcg)
XPYD_SIMT_STORE(__stcs)
#undef XPYD_SIMT_STORE

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Atomics on global memory; two host threads may run kernels at once. Those on shared memory are in simt.h.
#define XPYD_SIMT_ATOMIC(name, T, expression)                       \
  inline T name(T* p, T value) {                                    \
    auto place = ::xpyd::cuda::simt::global(p);                     \
    T old = place.load();                                           \
    while (!place.compare_exchange_weak(old, expression)) continue; \
    return old;                                                     \
  }
#define XPYD_SIMT_ATOMICS(T)                                  \
  XPYD_SIMT_ATOMIC(atomicAdd, T, (T)(old + value))            \
  XPYD_SIMT_ATOMIC(atomicMax, T, (old < value ? value : old)) \
  XPYD_SIMT_ATOMIC(atomicMin, T, (value < old ? value : old)) \
  XPYD_SIMT_ATOMIC(atomicExch, T, value)
XPYD_SIMT_ATOMICS(int)
XPYD_SIMT_ATOMICS(unsigned)
XPYD_SIMT_ATOMICS(unsigned long long)
XPYD_SIMT_ATOMIC(atomicAdd, float, old + value)
XPYD_SIMT_ATOMIC(atomicAdd, double, old + value)
XPYD_SIMT_ATOMIC(atomicExch, float, value)
XPYD_SIMT_ATOMIC(atomicOr, unsigned, (old | value))
XPYD_SIMT_ATOMIC(atomicAnd, unsigned, (old & value))
XPYD_SIMT_ATOMIC(atomicInc, unsigned, (old >= value ? 0u : old + 1))
#undef XPYD_SIMT_ATOMICS
#undef XPYD_SIMT_ATOMIC
template <class T>
inline T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  ::xpyd::cuda::simt::global(p).compare_exchange_strong(compare, value);
  return compare;
}
