// Large arrays of random numbers that are never copied: the card fills them, and whoever checks a
// result makes the same elements again.
#pragma once

#include "base/dtype.h"
#include "base/row_hash.h"

namespace xpyd {

// Element `place` of array `array`, uniform in [-1, 1).
XPYD_HD inline bf16 random_element(uint64_t array, uint64_t place) {
  return to_bf16(float(int32_t(uint32_t(mix64((array << 56) + place + 1)))) * 0x1p-31f);
}

}  // namespace xpyd
