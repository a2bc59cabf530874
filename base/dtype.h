// Element types and conversions between them. bf16 is the upper half of an f32, rounded to nearest even.
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

// int8 and int4 are unsigned codes with a scale and a zero, of a row of KV (kv_layout.h) or of a group of weights
// (model/gemm/quantised.h). fp8_e4m3 and fp8_e5m2 are 8-bit floats without a scale, for KV only. fp8 is e4m3 with a
// scale, for weights only.
enum class Dtype : uint8_t { f32, bf16, f16, int8, int4, fp8_e4m3, fp8_e5m2, fp8 };
inline constexpr Dtype kLastKvDtype = Dtype::fp8_e5m2, kLastDtype = Dtype::fp8;

XPYD_HD constexpr int dtype_bits(Dtype dtype) {
  return dtype == Dtype::f32 ? 32 : dtype == Dtype::bf16 || dtype == Dtype::f16 ? 16 : dtype == Dtype::int4 ? 4 : 8;
}
XPYD_HD constexpr size_t dtype_bytes(Dtype dtype) { return size_t(dtype_bits(dtype)) / 8; }  // not for int4
constexpr const char* dtype_name(Dtype dtype) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp8"};
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

// The nearest f16, ties to even; beyond 65520 infinity.
constexpr uint16_t nearest_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // below 2^-14 every f16 is a multiple of 2^-24: adding 0.5 leaves that many units
    return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

// An 8-bit float: sign, exponent, `mantissa` bits. 2^least is its smallest normal number. Codes above `largest` are not
// finite. e5m2 is the upper half of an f16; e4m3 has no infinity and one NaN.
struct Fp8Form {
  int mantissa, least;
  uint8_t largest, infinity, nan;
};
inline constexpr Fp8Form kE4m3 = {3, -6, 0x7e, 0x7f, 0x7f}, kE5m2 = {2, -14, 0x7b, 0x7c, 0x7e};

constexpr float e4m3_to_f32(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(0x7fc00000u);
  const float magnitude = exponent == 0
                              ? float(mantissa) * 0x1p-9f
                              : std::bit_cast<float>(uint32_t(exponent + 120) << 23 | uint32_t(mantissa) << 20);
  return code & 0x80 ? -magnitude : magnitude;
}
constexpr float e5m2_to_f32(uint8_t code) { return f16_to_f32(uint16_t(code << 8)); }

// The nearest number, ties to even. A finite x beyond the largest number becomes the largest.
constexpr uint8_t nearest_fp8(const Fp8Form& form, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (magnitude >= 0x7f800000u) return uint8_t(sign | (magnitude == 0x7f800000u ? form.infinity : form.nan));
  const int gone = 23 - form.mantissa;  // bits of the mantissa that are dropped
  const uint32_t normal = uint32_t(127 + form.least) << 23, unit = normal + (uint32_t(gone) << 23);
  // Below the normal numbers codes are multiples of one unit: adding 2^23 units leaves that many.
  const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(unit);
  const uint32_t rounds = (1u << (gone - 1)) - 1 + (magnitude >> gone & 1);
  const uint32_t code = magnitude < normal ? std::bit_cast<uint32_t>(sum) - unit
                                           : (magnitude - normal + (1u << 23) + rounds) >> gone;
  return uint8_t(sign | (code < form.largest ? code : form.largest));
}

}  // namespace xpyd
