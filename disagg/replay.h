// Takes every decision of a run's event logs again, with the policies of this build or with another one.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "disagg/event_log.h"

namespace xpyd::disagg {

struct ReplayOptions {
  std::map<std::string, std::string> instead;  // by kind of decision: another policy's name ("place": "lmetric")
};

struct Replayed {
  int64_t decisions = 0, differ = 0;
  double regret = 0;  // place: sum of the recorded choices' regret_ratio
};

// `differs`: the line, and what was decided now, as JSON. Errors: not_found; invalid_argument, with FILE:LINE: not a
// log, of another version, a broken line, or a policy that this build has not.
Result<std::map<std::string, Replayed>> replay(
    std::span<const std::string> paths, const ReplayOptions& options,
    const std::function<void(const std::string& line, const std::string& answer)>& differs);

}  // namespace xpyd::disagg
