// Draws of Mooncake's conversation trace. Its times are multiples of 3 s, and each draw spreads them anew.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "experiments/simulated.h"

namespace xpyd::experiments {

// Measures `run` over the draw that a point names in "sample". Each draw is read once.
inline Measure over_draws(const Setting& setting,
                          std::function<Result<Finding>(const Values& point, const disagg::Trace& trace)> run) {
  auto known = std::make_shared<std::map<int, disagg::Trace>>();
  return [=](const Values& point) -> Result<Finding> {
    const int draw = point["sample"];
    if (!known->contains(draw)) {
      const disagg::TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
      Result<disagg::Trace> trace = mooncake_trace("conversation", setting, reading);
      if (!trace) return trace.error();
      known->emplace(draw, std::move(trace).value());
    }
    return run(point, known->at(draw));
  };
}

}  // namespace xpyd::experiments
