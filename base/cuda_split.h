// A card's SMs cut in two: streams of one part cannot take the other's (green contexts; CUDA 12.5
// or later).
#pragma once

#include <memory>

#include "base/cuda.h"

namespace xpyd::cuda {

class Split {
 public:
  virtual ~Split() = default;
  // The first part gets n_sms, rounded up to what the card can cut (multiples of 8 on sm_90), the
  // second part the rest. Error `invalid_argument`: a part would be empty; `unavailable`: the
  // driver is too old.
  static Result<std::unique_ptr<Split>> cut(const Card& card, int n_sms);
  // SMs that work on this stream may take; 0: all of the card.
  static int n_sms_of(const Stream& stream);
  virtual int n_sms(int part) const = 0;
  // The handle is the caller's; no other call makes work on part 0 or 1.
  virtual cudaStream_t make_stream(int part, bool high_priority) = 0;
};

}  // namespace xpyd::cuda
