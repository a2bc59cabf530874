// Mooncake's cost model of one prompt, with its own constants.
#pragma once

namespace xpyd::experiments {

// The constants of FAST'25 (section 2.2, equations 1 and 2, table 1). The FLOPs of n tokens are layers * (a n^2 d + b n
// d^2), whatever the model's real widths are.
struct MooncakeCost {
  double layers, d, a, b, gqa, bytes_per_element;
  double kv_token_bytes() const { return layers * 2 * d / gqa * bytes_per_element; }
  double flops(double tokens) const { return layers * (a * tokens * tokens * d + b * tokens * d * d); }
  double break_even_bytes_per_s(double prefix, double flops_per_s) const {
    return prefix * kv_token_bytes() * flops_per_s / flops(prefix);
  }
};
inline constexpr MooncakeCost kMooncakeLlama70b = {80, 8192, 4, 22, 8, 2};

}  // namespace xpyd::experiments
