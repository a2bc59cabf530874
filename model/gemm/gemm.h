// y = x W^T (+ bias): the only matrix product of the project on the CPU.
//
// One addition order. K is cut into `k_groups` groups [g*K/G, (g+1)*K/G). Inside a group, each output element is one
// chain of fused multiply-adds over ascending k that starts from zero (the `portable` variants multiply, then add; k is
// ascending in PackedMatrix::order). The group sums are added in a fixed binary tree.
// So the bits of y[m, n] depend on x[m, :] and W[n, :] only, and not on M, the row's place in the batch, the number of
// threads or the blocking. Row-parallel projections (o_proj, down_proj) use kRowParallelGroups groups, so that the
// shards of a tensor-parallel run are subtrees of the same tree. All other products use one group.
//
// Weights are f32, bf16, f16 or quantised rows (quantised.h). An exact variant gives quantised weights the bits of the
// f32 matrix that they stand for. For int8 and int4, a variant that is not exact rounds the activations of each run of
// K to 16 or 8 bits, relative to the largest one (|x' - x| <= 1.01 max |x| / (2^bits - 2)). A run is a piece, or 32
// inputs of one for 8 bits. It sums integers, where order does not matter, and adds the runs of a group in one
// ascending chain. Its bits depend on the same inputs as above.
//
// Thread safety: a packed matrix is constant. A scratch and a team serve one product at a time, on the team's owner.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/cpu.h"
#include "base/dtype.h"
#include "base/memory.h"
#include "base/thread_team.h"
#include "base/work.h"
#include "model/gemm/quantised.h"

namespace xpyd::model {

inline constexpr int kRowParallelGroups = 8;

// The part of K that the K-groups `groups` of k_groups cover.
inline Range group_range(int k, int k_groups, Range groups) {
  return {int(long(groups.begin) * k / k_groups), int(long(groups.end) * k / k_groups)};
}

// Weights [n, k], packed once into panels of 16 output columns (README.md draws a panel).
struct PackedMatrix {
  // A part of one K-group, stored as one run in every panel. In a dense matrix it is the whole group. In a quantised
  // matrix it is at most kMaxPiece inputs that share a scale.
  struct Piece {
    Range k;        // positions in `order`
    Range stored;   // the same range, padded with zeros to whole steps of k_step()
    size_t offset;  // bytes from the start of a panel
    int group;      // the K-group
    int scale;      // quantised: index into QuantGroups
  };
  int n = 0, k = 0;  // rows of W (outputs), columns of W (inputs)
  int k_groups = 1;
  Dtype dtype = Dtype::f32;
  std::vector<Piece> pieces;
  std::vector<int32_t> order;  // [k]: input stored at each position; empty: unchanged. An input stays in its K-group
  size_t panel_bytes = 0;
  Buffer panels;  // [ceil(n / 16), panel_bytes]; columns beyond n are zero
  // Size without columns beyond n for dense weights; all panels, scales included, for quantised weights.
  size_t bytes() const { return is_quantised(dtype) ? panels.size() : size_t(n) * size_t(k) * dtype_bytes(dtype); }
  // Columns of W in these K-groups.
  Range k_range(Range groups) const { return group_range(k, k_groups, groups); }
  // Elements of scratch that one row of activations takes for these K-groups.
  int stored(Range groups) const;
};

// Lays out a matrix: every field but the contents of `panels`. `groups`: for quantised dtypes.
PackedMatrix lay_out(int n, int k, int k_groups, Dtype dtype, const QuantGroups* groups = nullptr);

// Reads row `n` of W into out[k] as f32. It runs once per row, on any thread of the team.
using RowReader = std::function<void(int n, float* out)>;
// Packs f32 rows. Requires: dtype is f32, bf16 or f16.
PackedMatrix pack_matrix(int n, int k, int k_groups, Dtype dtype, const RowReader& read_row, ThreadTeam& team);
// Reads row `n` of W into out[k], in the matrix's dtype.
using ElementReader = std::function<void(int n, std::byte* out)>;
// Packs rows that are of `dtype` already. Requires: dtype is f32, bf16 or f16.
PackedMatrix pack_elements(int n, int k, int k_groups, Dtype dtype, const ElementReader& read_row, ThreadTeam& team);
// Packs quantised rows. Requires: dtype is int8, int4 or fp8.
PackedMatrix pack_codes(int n, int k, int k_groups, Dtype dtype, const QuantGroups& groups, const QuantReader& read_row,
                        ThreadTeam& team);
// Writes rows [begin, end) of W, row_bytes apart, in w.dtype. Requires: w is f32, bf16 or f16.
void unpack_rows(const PackedMatrix& w, int begin, int end, std::byte* out, size_t row_bytes);

// A whole product, or a tensor-parallel rank's slice of it: some columns of y, or some K-groups of every sum. A slice
// reads the packed weights in place and has the bits of the whole product if its groups are an aligned power-of-two
// range, which is a subtree. Pointers need no alignment. A range or a size beyond the matrix or the scratch aborts.
struct GemmArgs {
  const float* x = nullptr;  // [m, K of `groups`], row stride x_stride
  float* y = nullptr;        // [m, columns], row stride y_stride
  const PackedMatrix* w = nullptr;
  const float* bias = nullptr;  // [w->n] or null; added after the tree
  int m = 0;
  int x_stride = 0, y_stride = 0;  // floats
  Range columns{0, 0};             // of [0, w->n); empty: all
  Range groups{0, 0};              // of [0, w->k_groups); empty: all

  int n() const { return columns.end > 0 ? columns.end - columns.begin : w->n; }
  Range k_range() const { return groups.end > 0 ? w->k_range(groups) : Range{0, w->k}; }
};

// Bytes and FLOPs of a product.
Work work(const GemmArgs& args);

// Scratch of one model: packed activations of up to max_m rows of max_k elements (PackedMatrix::stored).
class GemmScratch {
 public:
  GemmScratch(int max_m, int max_k, int n_threads);
  size_t bytes() const { return buffer.size(); }
  Buffer buffer;
  int max_m, max_k, n_threads;
};

using GemmFn = void (*)(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team);

struct GemmVariant {
  const char* name;
  GemmFn run;
  Isa needs;
  // Bits of the activations that meet int8 and int4 weights. 32: they stay f32, so that the product has the bits of f32
  // weights. 16 or 8: they are rounded once per product; in avx512_bf16, those that meet bf16 weights to bf16.
  int with_int8, with_int4;
  const char* source;
  int activation_bits(Dtype codes) const { return codes == Dtype::int8 ? with_int8 : with_int4; }
  bool exact() const { return with_int4 == 32; }
  bool available() const { return cpu_has(needs); }
};

// All variants, and the best one for this machine. `exact`: among exact variants only.
std::span<const GemmVariant> gemm_variants();
const GemmVariant& default_gemm(bool exact = false);

// The oracle of all variants: double precision, plain loops, the same groups.
void gemm_reference(const GemmArgs& args, const float* w_rows /* [n, k] */);

}  // namespace xpyd::model
