#include "model/gemm/row_team.h"

namespace xpyd::model {

void RowTeam::gemm(const PackedMatrix& w, const std::vector<float>& bias, const float* x, int x_stride, float* y,
                   int y_stride, int m, Range columns, Range groups) {
  GemmArgs args{.x = x,
                .y = y,
                .w = &w,
                .bias = bias.empty() ? nullptr : bias.data(),
                .m = m,
                .x_stride = x_stride,
                .y_stride = y_stride,
                .columns = columns,
                .groups = groups};
  gemm_.run(args, scratch_, team_);
}

void RowTeam::gated(const PackedMatrix& w, const std::vector<float>& bias, Range columns, const float* x, float* y,
                    int m) {
  const int inner = w.n / 2, width = columns.end - columns.begin, stride = 2 * width;
  if (width == inner) {
    gemm(w, bias, x, w.k, y, stride, m);
  } else if (width > 0) {
    gemm(w, bias, x, w.k, y, stride, m, columns);
    gemm(w, bias, x, w.k, y + width, stride, m, {columns.begin + inner, columns.end + inner});
  }
  for_elements(m, width, [&](int i, int begin, int end) {
    float* gate = y + size_t(i) * size_t(stride);
    ops_.swiglu(gate + begin, gate + width + begin, end - begin, gate + begin);
  });
}

}  // namespace xpyd::model
