// Repeats every decision recorded in a run's event logs, with the recorded policies as this build has them or with
// other ones.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "base/status.h"

namespace xpyd::disagg {

struct ReplayOptions {
  std::map<std::string, std::string> instead;  // kind of decision -> name of another policy ("place" -> "lmetric")
};

struct Replayed {
  int64_t decisions = 0, differ = 0;
  double regret = 0, regret_now = 0;  // place: sums of regret_ratio, as recorded and as decided now
};

// Calls `differs` with the line and the new decision (JSON) where the new decision differs. Errors: not_found;
// invalid_argument with FILE:LINE if the file is no log or has another version, a line is broken, or this build lacks a
// policy.
Result<std::map<std::string, Replayed>> replay(
    std::span<const std::string> paths, const ReplayOptions& options,
    const std::function<void(const std::string& line, const std::string& answer)>& differs);

}  // namespace xpyd::disagg
