// The interpreted forms of what base/cuda/cuda_kernel_sm90.h wraps: mbarriers, bulk tensor copies, wgmma, and barriers
// of some warps. Included by simt.h.
#pragma once

namespace xpyd::cuda {

struct TensorMap;

namespace simt {

// Barriers lie in shared memory. The interpreter knows each by its offset there.
void mbarrier_init_at(const uint64_t* barrier, int arrivals, Where where);
void mbarrier_arrive_at(const uint64_t* barrier, int bytes, Where where);
void mbarrier_wait_at(const uint64_t* barrier, int parity, Where where);
void mbarrier_init_done();
inline void mbarrier_init(const Shared<uint64_t>& barriers, Index i, int arrivals) {
  mbarrier_init_at(barriers.place(i, 1), arrivals, i.where);
}
inline void mbarrier_arrive(const Shared<uint64_t>& barriers, Index i) {
  mbarrier_arrive_at(barriers.place(i, 1), 0, i.where);
}
inline void mbarrier_expect(const Shared<uint64_t>& barriers, Index i, int bytes) {
  mbarrier_arrive_at(barriers.place(i, 1), bytes, i.where);
}
inline void mbarrier_wait(const Shared<uint64_t>& barriers, Index i, int parity) {
  mbarrier_wait_at(barriers.place(i, 1), parity, i.where);
}

void copy_box_to(bf16* to, const TensorMap& map, int column, int row, const uint64_t* barrier, Where where);
inline void copy_box(const Shared<bf16>& to, Index at, const TensorMap& map, int column, int row,
                     const Shared<uint64_t>& barriers, Index i) {
  copy_box_to(to.place(at, 1), map, column, row, barriers.place(i, 1), at.where);
}
void fence_proxy_async();

void barrier_of_some(int id, int threads, bool waits, Where where);
inline void barrier_sync(int id, int threads, Where where = Where::current()) {
  barrier_of_some(id, threads, true, where);
}
inline void barrier_arrive(int id, int threads, Where where = Where::current()) {
  barrier_of_some(id, threads, false, where);
}

template <int kRegisters, bool kMore>
void set_max_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

// The address has 32 bits, as on a GPU. Here it is the offset in the block's shared memory.
template <class T>
uint32_t shared_address(const Shared<T>& array, Index i) {
  return uint32_t(reinterpret_cast<std::byte*>(array.place(i, 1)) - shared_base());
}

// One thread's part of a product. d and a must stay in place until the wait.
struct Product {
  float* d;
  int blocks;         // d[blocks][4]
  const uint32_t* a;  // null: from shared memory
  uint64_t a_matrix, b_matrix;
  bool n_innermost, accumulate;
};
void wgmma(const Product& mine, Where where);
void wgmma_wait_for(int pending, Where where);
void wgmma_fence(Where where = Where::current());
void wgmma_commit(Where where = Where::current());
template <int kPending>
void wgmma_wait(Where where = Where::current()) {
  wgmma_wait_for(kPending, where);
}
template <int kBlocks>
void wgmma_shared(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulate, Where where = Where::current()) {
  wgmma({&d[0][0], kBlocks, nullptr, a, b, false, accumulate}, where);
}
template <int kBlocks>
void wgmma_registers(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b, Where where = Where::current()) {
  wgmma({&d[0][0], kBlocks, a, 0, b, true, true}, where);
}
template <class T, int kBlocks>
void keep_operands(T (&)[kBlocks][4]) {}

}  // namespace simt
}  // namespace xpyd::cuda
