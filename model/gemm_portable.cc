// What needs no instruction set: tiles in plain C++, and the oracle.
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "model/gemm.h"
#include "model/gemm_kernels.h"

namespace xpyd::model {
namespace {

// Inside the 32 bytes of one k a bf16 panel interleaves columns c and c + 8 (see gemm.md).
inline void load_row(const float* w, float* out) {
  for (int c = 0; c < kPanel; ++c) out[c] = w[c];
}
inline void load_row(const bf16* w, float* out) {
  for (int c = 0; c < kPanel / 2; ++c) {
    out[c] = to_f32(w[2 * c]);
    out[c + kPanel / 2] = to_f32(w[2 * c + 1]);
  }
}

// Multiply, then add: slower than AVX2 and with other bits, under the same rule of one chain per element.
template <int kRows, int kPanels, class Weight>
void tile(const GemmTile& t) {
  float sums[kPanels][kRows][kPanel] = {};
  if (t.resume)
    for (int i = 0; i < kPanels * kRows * kPanel; ++i) (&sums[0][0][0])[i] = t.sums[i];
  for (int p = 0; p < kPanels; ++p) {
    auto* w = reinterpret_cast<const Weight*>(t.w + size_t(p) * t.panel_bytes);
    for (int k = 0; k < t.k; ++k) {
      float row[kPanel];
      load_row(w + size_t(k) * kPanel, row);
      for (int r = 0; r < kRows; ++r) {
        float x = t.x[size_t(k) * kRows + r];
        for (int c = 0; c < kPanel; ++c) sums[p][r][c] += x * row[c];
      }
    }
  }
  for (int i = 0; i < kPanels * kRows * kPanel; ++i) t.sums[i] = (&sums[0][0][0])[i];
}

void add(float* into, const float* from, int n) {
  for (int i = 0; i < n; ++i) into[i] += from[i];
}

}  // namespace

const GemmKernels kPortableKernels = {XPYD_TILES(float), XPYD_TILES(bf16), add};

// The oracle of every gemm variant: double precision, one loop per index, the same groups and tree.
// Whole products only: a slice is compared with the part of the whole.
void gemm_reference(const GemmArgs& args, const float* w_rows) {
  const PackedMatrix& w = *args.w;
  const int groups = w.k_groups;
  for (int m = 0; m < args.m; ++m) {
    for (int n = 0; n < w.n; ++n) {
      std::vector<double> sums(size_t(groups), 0.0);
      for (int g = 0; g < groups; ++g)
        for (long k = long(g) * w.k / groups; k < long(g + 1) * w.k / groups; ++k)
          sums[size_t(g)] += double(args.x[size_t(m) * size_t(args.x_stride) + size_t(k)]) *
                             double(w_rows[size_t(n) * size_t(w.k) + size_t(k)]);
      for (int step = 1; step < groups; step *= 2)
        for (int left = 0; left + step < groups; left += 2 * step) sums[size_t(left)] += sums[size_t(left + step)];
      args.y[size_t(m) * size_t(args.y_stride) + size_t(n)] = float(sums[0] + (args.bias ? double(args.bias[n]) : 0.0));
    }
  }
}

}  // namespace xpyd::model
