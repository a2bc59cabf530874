// y = x W^T (+ bias): the one matrix product of the project, on the CPU.
//
// One addition order: K is cut into `k_groups` groups [g*K/G, (g+1)*K/G). Inside a group each output element is one
// chain of fused multiply-adds over ascending k that starts from zero; the group sums are added in a fixed binary tree.
// So the bits of y[m, n] depend on x[m, :] and W[n, :] and on nothing else: not on M, the row's place in the batch, the
// number of threads or the blocking. Row-parallel projections (o_proj, down_proj) use kRowParallelGroups groups, so
// that the shards of a tensor-parallel run are subtrees of the same tree; all others use one group.
//
// Weights are f32, bf16 or f16, or codes that stand for f32 numbers (quantised.h): a row of the table that is exact
// gives a matrix of codes the bits of the f32 matrix. Rows that are not exact round each activation of a piece of K to
// 16 bits, by the largest one's size (|x' - x| <= 1.01 2^-16 max |x|), sum whole numbers, which has no order, and add
// the pieces of a group as a chain in ascending order: bits that depend on the same as above.
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

// Weights [n, k] packed once into panels of 16 output columns (model/gemm/README.md draws the panel).
struct PackedMatrix {
  // A piece of one K-group as it lies in every panel: of a dense matrix the whole group, of codes what has one scale,
  // at most kMaxPiece of it.
  struct Piece {
    Range k;        // places in `order`
    Range stored;   // the same with zeros behind them, to whole steps (k_step)
    size_t offset;  // bytes from the start of a panel
    int group;      // of K
    int scale;      // of codes: which of QuantGroups
  };
  int n = 0, k = 0;  // rows of W = outputs, columns of W = inputs
  int k_groups = 1;
  Dtype dtype = Dtype::f32;
  std::vector<Piece> pieces;
  std::vector<int32_t> order;  // [k]: which input is stored at a place; empty: the same. Groups keep their inputs
  size_t panel_bytes = 0;
  Buffer panels;  // [ceil(n / 16), panel_bytes]; columns beyond n are zero
  // Without columns beyond n; of codes with their scales.
  size_t bytes() const { return is_quantised(dtype) ? panels.size() : size_t(n) * size_t(k) * dtype_bytes(dtype); }
  // Columns of W in these groups.
  Range k_range(Range groups) const {
    return {int(long(groups.begin) * k / k_groups), int(long(groups.end) * k / k_groups)};
  }
  // What they take as they are stored: scratch for one row of activations, in elements.
  int stored(Range groups) const;
};

// What a matrix is before its panels are there: where its pieces are. groups: of codes.
PackedMatrix lay_out(int n, int k, int k_groups, Dtype dtype, const QuantGroups* groups = nullptr);

// Reads row `n` of W into out[k] as f32. Called once per row, from any thread of the team.
using RowReader = std::function<void(int n, float* out)>;
// dtype: f32, bf16 or f16.
PackedMatrix pack_matrix(int n, int k, int k_groups, Dtype dtype, const RowReader& read_row, ThreadTeam& team);
// The same of rows that are of `dtype` already: out[k] elements.
using ElementReader = std::function<void(int n, std::byte* out)>;
PackedMatrix pack_elements(int n, int k, int k_groups, Dtype dtype, const ElementReader& read_row, ThreadTeam& team);
// dtype: int8, int4 or fp8.
PackedMatrix pack_codes(int n, int k, int k_groups, Dtype dtype, const QuantGroups& groups, const QuantReader& read_row,
                        ThreadTeam& team);
// The other way: rows [begin, end) of W as they were packed, in w.dtype, row_bytes apart. Of f32, bf16 and f16 alone.
void unpack_rows(const PackedMatrix& w, int begin, int end, std::byte* out, size_t row_bytes);
// And of codes: the groups that they were packed with (but empty ones at the end), and output n, which has that many.
QuantGroups unpack_groups(const PackedMatrix& w);
void unpack_codes(const PackedMatrix& w, int n, QuantRow& row);

// A whole product, or the slice of it that a tensor-parallel rank computes: columns of y, or
// K-groups of every sum. A slice reads its part of the packed weights where it is, and has the bits
// of the whole: a column is a column, and an aligned power-of-two range of groups is a subtree.
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

Work work(const GemmArgs& args);

// Scratch for packed activations of up to max_m rows of up to max_k elements (PackedMatrix::stored); one per model.
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
  // Activations as they are: the bits of a product of the f32 that the weights stand for. Else they are rounded once
  // per product where the weights are codes, and whole numbers are multiplied.
  bool exact;
  const char* source;
  bool available() const { return cpu_has(needs); }
};

std::span<const GemmVariant> gemm_variants();
const GemmVariant& default_gemm(bool exact = false);

// Double precision, plain loops, the same groups. The oracle.
void gemm_reference(const GemmArgs& args, const float* w_rows /* [n, k] */);

}  // namespace xpyd::model
