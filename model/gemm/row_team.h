// What a forward pass does with a team of threads: row operations, matrix products, and the gated product of an MLP.
//
// Thread safety: the team's owner makes every call.
#pragma once

#include <algorithm>
#include <vector>

#include "model/gemm/gemm.h"
#include "model/gemm/ops.h"

namespace xpyd::model {

class RowTeam {
 public:
  // A product has at most max_rows rows, each of at most max_stored elements (PackedMatrix::stored).
  RowTeam(ThreadTeam& team, const GemmVariant& gemm, int max_rows, int max_stored)
      : team_(team), gemm_(gemm), scratch_(max_rows, max_stored, team.size()) {}

  ThreadTeam& team() { return team_; }
  const Ops& ops() const { return ops_; }

  // Calls body(row, begin, end) over the elements [0, width) of all rows; the team shares the work.
  template <class Body>
  void for_elements(int n_rows, int width, Body body) {
    const int chunks = (width + kColumnChunk - 1) / kColumnChunk;
    auto part = [&](Range items) {
      for (int i = items.begin; i < items.end; ++i) {
        const int begin = i % chunks * kColumnChunk;
        body(i / chunks, begin, std::min(begin + kColumnChunk, width));
      }
    };
    if (long(n_rows) * width < kSerialElements) return part({0, n_rows * chunks});
    team_.run([&](int rank) { part(share(n_rows * chunks, rank, team_.size())); });
  }
  // Calls body(row) for all rows; `width` is a row's cost in elements.
  template <class Body>
  void for_rows(int n_rows, int width, Body body) {
    auto part = [&](Range rows) {
      for (int row = rows.begin; row < rows.end; ++row) body(row);
    };
    if (n_rows == 1 || long(n_rows) * width < kSerialElements) return part({0, n_rows});
    team_.run([&](int rank) { part(share(n_rows, rank, team_.size())); });
  }

  // y = x W^T + bias; an empty bias adds nothing. The other arguments are those of GemmArgs.
  void gemm(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride, float* y, int y_stride,
            int m, Range columns = {0, 0}, Range groups = {0, 0});
  // y = silu(x G^T) * (x U^T) for these columns of G and of U, of w = [G; U]. x is [m, w.k]. The row stride of y is
  // twice the number of columns, and its second half is scratch.
  void gated(const PackedMatrix& w, const std::vector<float>& bias, Range columns, const float* x, float* y, int m);

 private:
  // Smaller row operations run on the calling thread: handing them to the team would take as long.
  static constexpr long kSerialElements = 4096;
  // Rows are also cut into columns of this many elements, so that the team can share a single row.
  static constexpr int kColumnChunk = 1024;

  ThreadTeam& team_;
  const Ops& ops_ = default_ops();
  const GemmVariant& gemm_;
  GemmScratch scratch_;
};

}  // namespace xpyd::model
