// One row of KV: the head_dim elements of one token, layer, K or V, and KV head, in any dtype of kKvDtypes. This file
// defines the encoding of rows. int8 and int4 are TurboMind's asymmetric quantisation per token and head, K after RoPE:
//
//   [codes: head_dim bytes, or head_dim / 2 with the even d in the low half][scale: f16][zero: f16]
//   L = 2^bits - 1, zero = min, scale = (max - zero) / L, code = nearest((x - zero) / scale),
//   x' = code * scale + zero
//
// zero is rounded down and scale is rounded up to f16 before any element is coded. So [zero, zero + L scale] holds
// every element. With u = 2^-24 (three roundings of t = (x - zero) / scale <= L, one rounding of x'):
//
//   |x' - x| <= scale (1/2 + 4 L u) + u |x'|,
//   scale    <= (1 + 2^-10) (max - min + 2^-10 |min| + u) / L + u.
//
// Elements saturate at +-65504, the largest f16. If one element of a row is infinite or NaN, the whole row becomes NaN
// (its scale and zero are NaN), so that a broken value stays visible.
//
// A row of fp8_e4m3 or fp8_e5m2 is head_dim bytes without a scale. Each element is the nearest number of the format.
// This is vLLM's default, a scale of 1. Finite elements saturate at +-448 (e4m3) and +-57344 (e5m2). A NaN stays NaN;
// an infinity stays one in e5m2 and becomes NaN in e4m3, which has no infinity.
//
// A code of int8 or int4 has at most 8 significant bits and a scale has 11, so their product is exact in f32. x' is
// therefore rounded once, whether or not multiplication and addition are fused, and has the same bits on every device.
//
// Thread safety: plain functions; any thread.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "allocator/kv/kv_layout.h"

namespace xpyd::attention {

inline constexpr float kKvLargest = 65504.0f;

// Returns the f16 nearest to x that is not below x (`up`) or not above x. Requires |x| <= 65504.
constexpr uint16_t to_f16(float x, bool up) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  uint32_t half = 0;
  bool exact = false;
  if (magnitude < 0x38800000u) {  // below 2^-14 every f16 is a multiple of 2^-24
    const float units = std::bit_cast<float>(magnitude) * 0x1p24f;
    half = uint32_t(units), exact = float(half) == units;
  } else {
    half = (magnitude - 0x38000000u) >> 13, exact = (magnitude & 0x1fffu) == 0;
  }
  const bool negative = bits >> 31;
  if (!exact && up != negative) ++half;
  return uint16_t((negative ? 0x8000u : 0u) | half);
}

// The parameters with which the elements of one row are coded.
struct KvQuantiser {
  uint16_t scale = 0, zero = 0;  // f16 bits, as stored in the row
  float offset = 0, inverse = 0, largest = 0;

  uint32_t code(float x) const {
    x = x < -kKvLargest ? -kKvLargest : x;
    x = x > kKvLargest ? kKvLargest : x;
    float t = (x - offset) * inverse;  // >= 0
    t = t < largest ? t : largest;
    return std::bit_cast<uint32_t>(t + 0x1p23f) & 0xffu;  // nearest, ties to even
  }
};

// Returns the parameters of a row from its smallest and largest elements, NaN ignored. `poison` is the sum of 0 * x
// over its elements: 0 if all are finite, else NaN.
inline KvQuantiser kv_quantiser(Dtype dtype, float min, float max, float poison) {
  KvQuantiser q;
  q.largest = dtype == Dtype::int8 ? 255.0f : 15.0f;
  if (!(poison == 0)) {
    q.scale = q.zero = 0x7e00;
    return q;
  }
  min = min < -kKvLargest ? -kKvLargest : min > kKvLargest ? kKvLargest : min;
  max = max < -kKvLargest ? -kKvLargest : max > kKvLargest ? kKvLargest : max;
  q.zero = to_f16(min + 0.0f, false);  // -0 becomes 0, so that equal numbers give equal bytes
  q.offset = f16_to_f32(q.zero);
  q.scale = to_f16((max + 0.0f - q.offset) / q.largest, true);
  const float scale = f16_to_f32(q.scale);
  q.inverse = scale > 0 ? 1.0f / scale : 0.0f;
  return q;
}

struct KvScale {
  float scale = 0, zero = 0;
  float value(uint32_t code) const { return float(code) * scale + zero; }
};

// Reads scale and zero bytewise: a row of an odd number of bytes is not aligned.
inline KvScale kv_scale(const std::byte* behind_codes) {
  auto half = [&](int at) {
    return f16_to_f32(uint16_t(uint32_t(behind_codes[at]) | uint32_t(behind_codes[at + 1]) << 8));
  };
  return {half(0), half(2)};
}

inline uint32_t kv_code(Dtype dtype, const std::byte* row, int d) {
  if (dtype == Dtype::int8) return uint32_t(row[d]);
  return uint32_t(row[d / 2]) >> (d % 2 * 4) & 15u;
}

constexpr bool kv_is_fp8(Dtype dtype) { return dtype == Dtype::fp8_e4m3 || dtype == Dtype::fp8_e5m2; }
constexpr float kv_fp8(Dtype dtype, std::byte code) {
  return dtype == Dtype::fp8_e4m3 ? e4m3_to_f32(uint8_t(code)) : e5m2_to_f32(uint8_t(code));
}

// True if rows of this shape can be written and read: int4 needs an even head_dim.
constexpr bool kv_rows_supported(const KvShape& s) {
  for (Dtype dtype : allocator::kKvDtypes)
    if (s.dtype == dtype) return dtype != Dtype::int4 || s.head_dim % 2 == 0;
  return false;
}

// The functions below must not be inline, because files for one instruction set call them too. Encodes x[0, head_dim)
// into `row`.
void write_kv_row(Dtype dtype, int head_dim, const float* x, std::byte* row);
// Decodes elements [begin, end) into x[0, end - begin).
void read_kv_row(Dtype dtype, int head_dim, const std::byte* row, int begin, int end, float* x);
float kv_element(Dtype dtype, int head_dim, const std::byte* row, int d);

}  // namespace xpyd::attention
