#include "model/quantised.h"

#include <algorithm>
#include <cmath>

#include "attention/kv_row.h"

namespace xpyd::model {

namespace {
// Ties to even; |x| < 2^22.
int nearest(float x) { return std::bit_cast<int>(x + 0x1.8p23f) - 0x4b400000; }

// Widens [least, most] to x[begin, end); false: one of them is not finite.
bool extremes(const float* begin, const float* end, float& least, float& most) {
  constexpr int kLanes = 8;  // so that the compiler may use vectors
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

uint8_t to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude in [2^(e-1), 2^e)
  // Of 2^(e-1) the step is 2^(e-4); below 2^-6 it is 2^-9. Halfway goes to the even code.
  const int step = std::max(exponent - 4, -9);
  const int units = int(std::nearbyint(std::ldexp(magnitude, -step)));
  // Codes are consecutive: 8 of them for each power of two above the subnormals.
  const int code = (step + 9) * 8 + units;
  return uint8_t(sign | std::min(code, 0x7e));
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
  for (size_t begin = 0, end = 0; begin < k; begin = end) {  // inputs of one group in a row
    const auto g = size_t(groups.of[begin]);
    while (end < k && size_t(groups.of[end]) == g) ++end;
    if (!extremes(x + begin, x + end, least[g], most[g])) return false;
  }
  std::vector<float> inverse(row.scale.size());
  for (size_t g = 0; g < row.scale.size(); ++g) {
    const float largest = std::max(-least[g], most[g]);
    const auto up = [](float scale) { return f16_to_f32(attention::to_f16(std::min(scale, 65504.0f), true)); };
    if (dtype == Dtype::fp8) {
      row.scale[g] = largest / 448;
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
    const float units = x[i] * inverse[g];
    if (dtype == Dtype::fp8)
      row.codes[i] = to_e4m3(std::clamp(units, -448.0f, 448.0f));
    else
      row.codes[i] = uint8_t(std::clamp(nearest(units) + row.zero[g], 0, dtype == Dtype::int8 ? 255 : 15));
  }
  return true;
}

}  // namespace xpyd::model
