#include "tests/cute/oracle.h"

#include <cstddef>
#include <cstdlib>

// CuTe asks for the shared-memory address of a pointer. It is set here for this one.
namespace {
alignas(1024) unsigned short shared[192 * 128];
uint32_t shared_begin = 0;
inline size_t __cvta_generic_to_shared(const void* p) {
  return shared_begin + size_t(static_cast<const char*>(p) - reinterpret_cast<char*>(shared));
}
}  // namespace
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace xpyd::cute_oracle {
namespace {

using namespace cute;
using Mma = MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>;

// CuTe counts a fragment's elements with the row (m or n) innermost.
template <class Layout>
At at(Layout layout, int rows, int lane, int i) {
  int index = int(layout(lane, i));
  return {index % rows, index / rows};
}

// Calls f(matrix as a tensor of (row that is m or n, k), whether its columns are k).
template <class F>
auto with(const Matrix& m, F f) {
  auto pointer = make_smem_ptr(reinterpret_cast<bfloat16_t*>(shared));
  auto of = [&]<int kRows, int kColumns>() {
    using Innermost = SM90::GMMA::Layout_K_SW128_Atom<bfloat16_t>;
    using Outermost = SM90::GMMA::Layout_MN_SW128_Atom<bfloat16_t>;
    if (m.k_innermost)
      return f(make_tensor(pointer, tile_to_shape(Innermost{}, Shape<Int<kRows>, Int<kColumns>>{})), true_type{});
    return f(make_tensor(pointer, tile_to_shape(Outermost{}, Shape<Int<kColumns>, Int<kRows>>{}, Step<_2, _1>{})),
             false_type{});
  };
  if (m.rows == 128 && m.columns == 64) return of.template operator()<128, 64>();
  if (m.rows == 128 && m.columns == 128) return of.template operator()<128, 128>();
  if (m.rows == 192 && m.columns == 64) return of.template operator()<192, 64>();
  abort();
}

}  // namespace

At mma_a(int lane, int i) { return at(Mma::ALayout{}, 16, lane, i); }
At mma_b(int lane, int i) { return at(Mma::BLayout{}, 8, lane, i); }
At mma_c(int lane, int i) { return at(Mma::CLayout{}, 16, lane, i); }
At wgmma_a(int thread, int i) { return at(SM90::GMMA::ALayout_64x16{}, 64, thread, i); }
At wgmma_c(int n, int thread, int i) {
  if (n == 64) return at(SM90::GMMA::CLayout_64x64{}, 64, thread, i);
  if (n == 128) return at(SM90::GMMA::CLayout_64x128{}, 64, thread, i);
  abort();
}

int ldmatrix(bool transposed, int lane, int i) {  // CuTe counts bits
  if (transposed) return int(Copy_Traits<SM75_U16x8_LDSM_T>::DstLayout{}(lane, 16 * i)) / 16;
  return int(Copy_Traits<SM75_U32x4_LDSM_N>::DstLayout{}(lane, 16 * i)) / 16;
}

int element(const Matrix& m, int row, int column) {
  return with(m, [&](auto tensor, auto k_innermost) {
    auto* found = k_innermost ? &tensor(row, column) : &tensor(column, row);
    return int(reinterpret_cast<const unsigned short*>(found) - shared);
  });
}

uint64_t descriptor(const Matrix& m, uint32_t address, int first, int rows, int step) {
  shared_begin = address;
  return with(m, [&](auto tensor, auto k_innermost) -> uint64_t {
    using SM90::GMMA::Major, SM90::GMMA::make_gmma_desc;
    if constexpr (k_innermost) {
      auto of = [&](auto n) {
        auto tile = local_tile(tensor, make_shape(n, _16{}), make_coord(first / n, step));
        return make_gmma_desc<Major::K>(tile).desc_;
      };
      return rows == 64 ? of(_64{}) : of(_128{});
    } else {
      auto tile = local_tile(tensor, make_shape(size<0>(tensor), _16{}), make_coord(0, step));
      return make_gmma_desc<Major::MN>(tile).desc_;
    }
  });
}

int row_major(int columns, int row, int column) {
  if (columns == 64) return int(Swizzle<3, 3, 3>{}(row * 64 + column));
  return int(Swizzle<3, 3, 4>{}(row * 128 + column));
}

}  // namespace xpyd::cute_oracle
