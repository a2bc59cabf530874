// Views of a run's event logs: a Chrome trace (for ui.perfetto.dev or chrome://tracing), and where the time of each
// request went.
//
// Thread safety: plain functions.
#pragma once

#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "disagg/request_trace.h"

namespace xpyd::disagg {

// Writes the logs as a JSON object of trace events. Each instance is a process: one track has its steps, and counters
// show its blocks and queues. Each pair of instances between which KV moves is a process, with a track for each
// request. One process has all requests, with a track and its phases for each. Arrows lead from a transfer to D.
// Errors: those of replay().
Status write_trace(std::span<const std::string> paths, std::FILE* out);

// Every request that has ended, in the order of their ends, without its gaps. Errors: those of replay().
Result<std::vector<RequestTrace>> read_traces(std::span<const std::string> paths);

}  // namespace xpyd::disagg
