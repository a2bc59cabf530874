// Reads the event logs of a run (disagg/conductor/event_log.h).
//
// Thread safety: plain functions.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "base/status.h"

namespace xpyd::disagg {

// Calls `line` with each line after the first of each file, in order, as text and parsed. A cut last line is skipped
// with a warning; a killed process leaves one. Of several files one may hold nothing else. Errors: not_found;
// invalid_argument as FILE:LINE for a file that is not a log, another version, a broken line, or what `line` throws;
// also if `paths` is empty.
Status read_event_logs(std::span<const std::string> paths,
                       const std::function<void(const std::string& text, const nlohmann::json& line)>& line);

}  // namespace xpyd::disagg
