// Element types and the conversions between them. bf16 is the upper half of an f32, rounded to nearest even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define XPYD_HD __host__ __device__
#else
#define XPYD_HD
#endif

#include "base/rooms.h"

namespace xpyd {

// int8 and int4 are unsigned codes with a scale and a zero: of a row of KV (kv_layout.h), of a group of weights
// (model/quantised.h). fp8 is e4m3 (4 bits of exponent, 3 of mantissa, no infinity), of weights only.
enum class Dtype : uint8_t { f32, bf16, f16, int8, int4, fp8 };

XPYD_HD constexpr int dtype_bits(Dtype dtype) {
  return dtype == Dtype::f32 ? 32 : dtype == Dtype::int8 || dtype == Dtype::fp8 ? 8 : dtype == Dtype::int4 ? 4 : 16;
}
XPYD_HD constexpr size_t dtype_bytes(Dtype dtype) { return size_t(dtype_bits(dtype)) / 8; }  // not int4
constexpr const char* dtype_name(Dtype dtype) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "int8", "int4", "fp8"};
  return kNames[int(dtype)];
}

struct bf16 {
  uint16_t bits;
};

constexpr float to_f32(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
constexpr bf16 to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40)};  // NaN stays NaN
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
constexpr float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Nearest, ties to even; beyond 65520 infinity.
constexpr uint16_t nearest_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // below 2^-14 f16 are multiples of 2^-24: adding 0.5 leaves as many units
    return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace xpyd
