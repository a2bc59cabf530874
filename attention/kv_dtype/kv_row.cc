#include "attention/kv_dtype/kv_row.h"

#include <algorithm>
#include <cstring>
#include <limits>


namespace xpyd::attention {
namespace {

constexpr int kLanes = 8;  // independent minima and maxima, so that the compiler may use vectors

KvQuantiser quantiser_of(Dtype dtype, int head_dim, const float* x) {
  float min[kLanes], max[kLanes], poison[kLanes] = {};
  std::fill_n(min, kLanes, std::numeric_limits<float>::infinity());
  std::fill_n(max, kLanes, -std::numeric_limits<float>::infinity());
  auto take = [&](int lane, float y) {
    min[lane] = y < min[lane] ? y : min[lane];
    max[lane] = y > max[lane] ? y : max[lane];
    poison[lane] += 0.0f * y;
  };
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes)
    for (int i = 0; i < kLanes; ++i) take(i, x[d + i]);
  for (; d < head_dim; ++d) take(0, x[d]);
  for (int i = 1; i < kLanes; ++i) {
    min[0] = std::min(min[0], min[i]), max[0] = std::max(max[0], max[i]);
    poison[0] += poison[i];
  }
  return kv_quantiser(dtype, min[0], max[0], poison[0]);
}

}  // namespace

void write_kv_row(Dtype dtype, int head_dim, const float* x, std::byte* row) {
  if (dtype == Dtype::f32) {
    std::memcpy(row, x, size_t(head_dim) * sizeof(float));
    return;
  }
  if (dtype == Dtype::bf16) {
    bf16* out = reinterpret_cast<bf16*>(row);
    for (int d = 0; d < head_dim; ++d) out[d] = to_bf16(x[d]);
    return;
  }
  if (kv_is_fp8(dtype)) {
    const Fp8Form& form = dtype == Dtype::fp8_e4m3 ? kE4m3 : kE5m2;
    for (int d = 0; d < head_dim; ++d) row[d] = std::byte(nearest_fp8(form, x[d]));
    return;
  }
  const KvQuantiser q = quantiser_of(dtype, head_dim, x);
  const bool int8 = dtype == Dtype::int8;
  if (int8) {
    for (int d = 0; d < head_dim; ++d) row[d] = std::byte(q.code(x[d]));
    row += head_dim;
  } else {
    for (int d = 0; d < head_dim; d += 2) row[d / 2] = std::byte(q.code(x[d]) | q.code(x[d + 1]) << 4);
    row += head_dim / 2;
  }
  std::memcpy(row, &q.scale, 2);
  std::memcpy(row + 2, &q.zero, 2);
}

float kv_element(Dtype dtype, int head_dim, const std::byte* row, int d) {
  if (dtype == Dtype::f32) {
    float x;
    std::memcpy(&x, row + 4 * size_t(d), 4);
    return x;
  }
  if (dtype == Dtype::bf16) {
    bf16 x;
    std::memcpy(&x, row + 2 * size_t(d), 2);
    return to_f32(x);
  }
  if (kv_is_fp8(dtype)) return kv_fp8(dtype, row[d]);
  const int codes = dtype == Dtype::int8 ? head_dim : head_dim / 2;
  return kv_scale(row + codes).value(kv_code(dtype, row, d));
}

void read_kv_row(Dtype dtype, int head_dim, const std::byte* row, int begin, int end, float* x) {
  if (dtype == Dtype::f32) {
    std::memcpy(x, row + 4 * size_t(begin), size_t(end - begin) * sizeof(float));
  } else if (dtype == Dtype::bf16 || kv_is_fp8(dtype)) {
    for (int d = begin; d < end; ++d) x[d - begin] = kv_element(dtype, head_dim, row, d);
  } else {
    const KvScale s = kv_scale(row + (dtype == Dtype::int8 ? head_dim : head_dim / 2));
    for (int d = begin; d < end; ++d) x[d - begin] = s.value(kv_code(dtype, row, d));
  }
}

}  // namespace xpyd::attention
