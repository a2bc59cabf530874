// The bytes and FLOPs that an operation needs at least: the denominator of every printed share.
#pragma once

#include <cstddef>

namespace xpyd {

struct Work {
  double bytes = 0;  // compulsory traffic: each operand read once, each result written once
  double flops = 0;  // useful floating-point operations; a masked element counts nothing
};

}  // namespace xpyd
