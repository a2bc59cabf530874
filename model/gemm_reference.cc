// The oracle of every gemm variant: double precision, one loop per index, the same groups and tree.
#include <vector>

#include "base/status.h"
#include "model/gemm.h"

namespace xpyd {

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

}  // namespace xpyd
