// Device code for sm_90a beyond base/cuda/cuda_kernel.h: barriers in shared memory that copies complete (mbarrier),
// bulk tensor copies, products of a warpgroup on shared memory (wgmma), named barriers, and registers that pass from
// one warpgroup to another. Under -DXPYD_SIMT each is interpreted (tests/simt/sm90.h).
//
// Only *_sm90.cu may include it: these are instructions of sm_90a, which no other card has.
#pragma once

#include "base/cuda/cuda.h"
#include "base/cuda/cuda_kernel.h"

namespace xpyd::cuda {

#ifdef XPYD_SIMT
using simt::barrier_arrive;
using simt::barrier_sync;
using simt::copy_box;
using simt::fence_proxy_async;
using simt::keep_operands;
using simt::mbarrier_arrive;
using simt::mbarrier_expect;
using simt::mbarrier_init;
using simt::mbarrier_init_done;
using simt::mbarrier_wait;
using simt::set_max_registers;
using simt::shared_address;
using simt::wgmma_commit;
using simt::wgmma_fence;
using simt::wgmma_registers;
using simt::wgmma_shared;
using simt::wgmma_wait;
#else

// An address in shared memory as descriptors and asm take it: 32 bits.
template <class T>
__device__ inline uint32_t shared_address(const Shared<T>& array, int i) {
  return uint32_t(__cvta_generic_to_shared(array.data + i));
}

// --- mbarrier: it completes a phase when `arrivals` threads have arrived and all expected bytes have come, and begins
// the next phase. A phase has the parity of its number: 0, 1, 0, ...

// One thread calls it before everything else, then mbarrier_init_done(); then all call __syncthreads.
__device__ inline void mbarrier_init(const Shared<uint64_t>& barriers, int i, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barriers, i)), "r"(arrivals)
               : "memory");
}
__device__ inline void mbarrier_init_done() {  // makes them visible to the copy engine, too
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ inline void mbarrier_arrive(const Shared<uint64_t>& barriers, int i) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barriers, i)) : "memory");
}
// Arrives, and makes the phase wait for `bytes` more.
__device__ inline void mbarrier_expect(const Shared<uint64_t>& barriers, int i, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barriers, i)), "r"(bytes)
               : "memory");
}
// Waits until the phase of that parity is complete. For a new barrier the phase of parity 1 counts as complete.
__device__ inline void mbarrier_wait(const Shared<uint64_t>& barriers, int i, int parity) {
  uint32_t address = shared_address(barriers, i), done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (!done);
}

// --- Copies. One thread starts the copy of the box whose first element is (row, column) to element `at` of `to`; its
// bytes count on barrier i. The box's first row must be at a multiple of 1024 bytes.
__device__ inline void copy_box(const Shared<bf16>& to, int at, const TensorMap& map, int column, int row,
                                const Shared<uint64_t>& barriers, int i) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];\n" ::"r"(shared_address(to, at)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barriers, i))
      : "memory");
}
// Makes what this thread has written to shared memory visible to copies and wgmma of all threads that pass a later
// barrier.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// --- Named barriers of `threads` threads, whole warps, of which some wait and the others only arrive. id 0 is
// __syncthreads.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// --- Sets the registers of each thread of this warpgroup: fewer are released at once, more are waited for.
template <int kRegisters, bool kMore>
__device__ inline void set_max_registers() {
  if constexpr (kMore)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// --- wgmma: d[64, N] += a[64, 16] b[16, N], bf16 in, f32 out, by the 128 threads of a warpgroup together and
// asynchronously: fence, products, commit, wait. Warp w has rows 16 w and after. d and a are distributed over its lanes
// as in mma_m16n8k16; d[n] is the block of columns 8 n and after. Before the wait, registers of d and a must not be
// accessed, and shared memory of a and b must not be written.

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until at most kPending of the committed groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// The compiler believes that registers change where wgmma starts. This keeps their uses from moving across a wait, and
// earlier writes to them from moving behind a fence.
template <int kBlocks>
__device__ inline void keep_operands(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

template <int kSteps>
__device__ inline void keep_operands(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

#define XPYD_F4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define XPYD_F16(d, i) XPYD_F4(d, i), XPYD_F4(d, i + 1), XPYD_F4(d, i + 2), XPYD_F4(d, i + 3)
#define XPYD_NAMES_32                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define XPYD_NAMES_64                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "     \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, " \
  "%33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// a and b in shared memory, both with k innermost. If !accumulate, d = a b.
__device__ inline void wgmma_shared(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " XPYD_NAMES_64 ", %64, %65, p, 1, 1, 0, 0;\n}\n"
      : XPYD_F16(d, 0), XPYD_F16(d, 4), XPYD_F16(d, 8), XPYD_F16(d, 12)
      : "l"(a), "l"(b), "r"(int(accumulate)));
}
// a in registers, b in shared memory with n innermost ("transposed").
__device__ inline void wgmma_registers(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " XPYD_NAMES_64
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : XPYD_F16(d, 0), XPYD_F16(d, 4), XPYD_F16(d, 8), XPYD_F16(d, 12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
__device__ inline void wgmma_registers(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " XPYD_NAMES_32
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : XPYD_F16(d, 0), XPYD_F16(d, 4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
#undef XPYD_F4
#undef XPYD_F16
#undef XPYD_NAMES_32
#undef XPYD_NAMES_64
#endif

// The descriptor of a matrix in shared memory for wgmma (PTX ISA, "Matrix descriptor"), in the form in which copy_box
// leaves it: swizzled rows of 64 elements, 128 bytes, with groups of 8 rows at multiples of 1024 bytes. `address` may
// also be that of a multiple of 16 elements further inside the rows, or of a later group of 8 rows.
//   k innermost: a row is an m (or n); `next_columns` is not used.
//   n innermost: a row is a k; columns 64 and after begin `next_columns` bytes behind columns 0 to 63, a
//   multiple of 1024.
__device__ inline uint64_t matrix_descriptor(uint32_t address, int next_columns = 16) {
  constexpr uint64_t kSwizzle128 = 1, kNextRows = 1024;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(next_columns >> 4) << 16 | (kNextRows >> 4) << 32 |
         kSwizzle128 << 62;
}
// The same descriptor, `bytes` further.
__device__ inline uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + uint64_t(bytes >> 4); }

}  // namespace xpyd::cuda
