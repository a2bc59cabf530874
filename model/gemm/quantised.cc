#include "model/gemm/quantised.h"

#include <algorithm>
#include <cmath>

#include "attention/kv_dtype/kv_row.h"

namespace xpyd::model {

namespace {
constexpr float kTiny = 0x1p-110f;  // a row with no larger element is 0 in fp8: its scale would have no finite inverse

// Rounds ties to even. Requires: |x| < 2^22.
int nearest(float x) { return std::bit_cast<int>(x + 0x1.8p23f) - 0x4b400000; }

// Widens [least, most] to x[begin, end). Returns false if a value is not finite.
bool extremes(const float* begin, const float* end, float& least, float& most) {
  constexpr int kLanes = 8;  // lets the compiler use vectors
  float low[kLanes] = {}, high[kLanes] = {}, poison[kLanes] = {};
  const auto take = [&](int j, float x) {
    low[j] = x < low[j] ? x : low[j], high[j] = x > high[j] ? x : high[j], poison[j] += 0 * x;
  };
  for (; end - begin >= kLanes; begin += kLanes)
    for (int j = 0; j < kLanes; ++j) take(j, begin[j]);
  for (; begin < end; ++begin) take(0, *begin);
  for (int j = 0; j < kLanes; ++j) {
    least = std::min(least, low[j]), most = std::max(most, high[j]);
    if (!(poison[j] == 0)) return false;
  }
  return true;
}

}  // namespace

QuantGroups even_groups(int k, int size) {
  if (size == 0) size = k;
  QuantGroups groups{(k + size - 1) / size, std::vector<int32_t>(size_t(k))};
  for (int i = 0; i < k; ++i) groups.of[size_t(i)] = i / size;
  return groups;
}

void widen_row(Dtype dtype, const QuantGroups& groups, const QuantRow& row, float* out) {
  for (size_t k = 0; k < row.codes.size(); ++k) {
    const auto g = size_t(groups.of[k]);
    out[k] = row.scale[g] *
             (dtype == Dtype::fp8 ? e4m3_to_f32(row.codes[k]) : float(int(row.codes[k]) - int(row.zero[g])));
  }
}

bool quantise_row(Dtype dtype, const QuantGroups& groups, const float* x, QuantRow& row) {
  const size_t k = row.codes.size();
  std::vector<float> least(row.scale.size()), most(row.scale.size());
  for (size_t begin = 0, end = 0; begin < k; begin = end) {  // consecutive inputs of one group
    const auto g = size_t(groups.of[begin]);
    while (end < k && size_t(groups.of[end]) == g) ++end;
    if (!extremes(x + begin, x + end, least[g], most[g])) return false;
    if (dtype != Dtype::fp8 && std::max(-least[g], most[g]) > 65504.0f * (dtype == Dtype::int8 ? 127 : 7)) return false;
  }
  std::vector<float> inverse(row.scale.size());
  for (size_t g = 0; g < row.scale.size(); ++g) {
    const float largest = std::max(-least[g], most[g]);
    const auto up = [](float scale) { return f16_to_f32(attention::to_f16(std::min(scale, 65504.0f), true)); };
    if (dtype == Dtype::fp8) {
      row.scale[g] = largest < kTiny ? 0 : largest / 448;
    } else if (dtype == Dtype::int8) {
      row.scale[g] = up(largest / 127), row.zero[g] = 128;
    } else {
      row.scale[g] = up((most[g] - least[g]) / 15);
      row.zero[g] = row.scale[g] > 0 ? uint8_t(std::nearbyint(-least[g] / row.scale[g])) : 0;
    }
    inverse[g] = row.scale[g] > 0 ? 1 / row.scale[g] : 0;
  }
  for (size_t i = 0; i < k; ++i) {
    const auto g = size_t(groups.of[i]);
    const float units = std::clamp(x[i] * inverse[g], -448.0f, 448.0f);  // out of range only at the largest scale
    if (dtype == Dtype::fp8)
      row.codes[i] = nearest_fp8(kE4m3, units);
    else
      row.codes[i] = uint8_t(std::clamp(nearest(units) + row.zero[g], 0, dtype == Dtype::int8 ? 255 : 15));
  }
  return true;
}

}  // namespace xpyd::model
