// Takes every decision of a run's event logs again, with the policies of this build or with another one.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "disagg/conductor/event_log.h"

namespace xpyd::disagg {

struct ReplayOptions {
  std::map<std::string, std::string> instead;  // by kind of decision: another policy's name ("place": "lmetric")
};

struct Replayed {
  int64_t decisions = 0, differ = 0;
  double regret = 0, regret_now = 0;  // place: sums of regret_ratio, of the recorded choices and of those made now
};

// `differs`: the line, and what was decided now, as JSON. Errors: not_found; invalid_argument, with FILE:LINE: not a
// log, of another version, a broken line, or a policy that this build has not.
Result<std::map<std::string, Replayed>> replay(
    std::span<const std::string> paths, const ReplayOptions& options,
    const std::function<void(const std::string& line, const std::string& answer)>& differs);

}  // namespace xpyd::disagg
