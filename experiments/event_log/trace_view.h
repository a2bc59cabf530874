// A run's event logs as other eyes read them: a Chrome trace (ui.perfetto.dev, chrome://tracing), and where each
// request's time went.
//
// Thread safety: plain functions.
#pragma once

#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "disagg/life.h"

namespace xpyd::disagg {

// Writes the logs as a JSON object of trace events: a process for each instance, in which a track has its steps and
// counters show its blocks and queues; one for each wire, with a track for each request whose KV it carries; one of all
// requests, in which a track is one request with its phases; arrows from a wire to D. Errors: as replay()'s.
Status write_trace(std::span<const std::string> paths, std::FILE* out);

// Every request that has ended, in the order of their ends, without its gaps. Errors: as replay()'s.
Result<std::vector<RequestLife>> read_lives(std::span<const std::string> paths);

}  // namespace xpyd::disagg
