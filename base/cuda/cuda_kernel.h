// Device code for kernels beyond CUDA's own: shared memory that an interpreter can check, and the tensor-core and copy
// instructions of sm_80 as functions. One source serves two machines. Under nvcc these are pointers and PTX. Under
// -DXPYD_SIMT (tests/simt) every access to shared memory is checked for its bounds and for races between barriers, and
// the instructions are interpreted lane by lane.
//
// Otherwise kernels are plain CUDA: __global__, __device__, threadIdx, blockIdx, blockDim, gridDim, __syncthreads,
// __syncwarp, __shfl_sync, __shfl_xor_sync, __ballot_sync, __any_sync, atomicAdd, __expf, rsqrtf.
// They have no __shared__ variables. Carver cuts arrays out of the block's dynamic shared memory.
#pragma once

#include <bit>
#include <cstdint>

#include "base/cuda/cuda.h"
#include "base/dtype.h"

namespace xpyd::cuda {

#ifdef XPYD_SIMT
using simt::Shared;  // operator[] returns a checked proxy; the rest is as below
using simt::shared_base;
#else
// An array in the thread block's shared memory.
template <class T>
struct Shared {
  T* data;
  int n;  // elements
  __device__ T& operator[](int i) const { return data[i]; }
  __device__ Shared at(int i, int count) const { return {data + i, count}; }  // a part of it
};
__device__ inline std::byte* shared_base() {
  extern __shared__ __align__(1024) std::byte xpyd_shared[];
  return xpyd_shared;
}
#endif

// Cuts the dynamic shared memory into arrays, each aligned to 16 bytes. Host code adds up the same sizes:
// shared_bytes<T>(n) for each array.
template <class T>
constexpr size_t shared_bytes(size_t n) {
  return (n * sizeof(T) + 15) / 16 * 16;
}
struct Carver {
  size_t used = 0;
  template <class T>
  __device__ Shared<T> take(int n) {
    T* begin = reinterpret_cast<T*>(shared_base() + used);
    used += shared_bytes<T>(size_t(n));
    return Shared<T>{begin, n};
  }
};

#ifdef XPYD_SIMT
using simt::cp_async_16;
using simt::cp_async_commit;
using simt::cp_async_wait;
using simt::ldmatrix_x4;
using simt::ldmatrix_x4_trans;
using simt::load_16;
using simt::mma_m16n8k16;
using simt::store_16;
__device__ inline float exp2_approx(float x) { return exp2f(x); }
__device__ inline uint32_t pack_bf16(float low, float high) {
  return uint32_t(to_bf16(low).bits) | uint32_t(to_bf16(high).bits) << 16;
}
#else
// Reads or writes 16 bytes of shared memory at once, as four words, at element i (16-byte aligned).
template <class T>
__device__ inline uint4 load_16(const Shared<T>& from, int i) {
  return *reinterpret_cast<const uint4*>(from.data + i);
}
template <class T>
__device__ inline void store_16(const Shared<T>& to, int i, uint4 value) {
  *reinterpret_cast<uint4*>(to.data + i) = value;
}

// Copies 16 bytes from global to shared memory without a register, or zeros if !valid (`from` is not read then). They
// are visible to this thread after cp_async_wait, and to the others after a barrier that follows.
template <class T>
__device__ inline void cp_async_16(const Shared<T>& to, int i, const void* from, bool valid = true) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(to.data + i));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most N of this thread's committed groups are in flight.
template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the 16-byte row l % 8 of matrix l / 8, at element i. It
// gets, of each matrix, the two elements of row l / 4, columns 2 (l % 4) and + 1 (trans: of the transpose).
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const Shared<bf16>& from, int i) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(from.data + i));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const Shared<bf16>& from, int i) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(from.data + i));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8], bf16 in, f32 out. PTX defines which lanes hold which elements (PTX ISA, "Matrix
// fragments for mma.m16n8k16 with floating point type").
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x in one instruction with a relative error of at most 2^-22; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as two bf16 in one word, `low` in the lower half; rounds as to_bf16.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#endif

// All 32 lanes get the same sum or maximum, combined in one fixed order.
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline int warp_sum(int x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Keys whose unsigned order is the order of the floats, all above 0; no NaN; -0 and +0 are equal.
__device__ inline uint32_t order_key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x == 0 ? 0.0f : x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

}  // namespace xpyd::cuda
