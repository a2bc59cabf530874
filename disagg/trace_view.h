// An event log as other eyes read it: a Chrome trace (ui.perfetto.dev, chrome://tracing), and one request's
// attribution.
//
// Thread safety: plain functions.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "base/status.h"
#include "disagg/life.h"

namespace xpyd::disagg {

// Writes the log as a JSON object of trace events: a process for each instance, in which a track has its steps and
// counters show its blocks and queues; a process of all requests, in which a track is one request with its phases;
// arrows from P to D. Errors: as replay()'s.
Status write_trace(const std::string& path, std::FILE* out);

// Every request that has ended, in the order of their ends. Errors: as replay()'s.
Status each_life(const std::string& path, const std::function<void(const RequestLife& life)>& see);

// The request's life; of several with that number, the last. Errors: not_found; as replay()'s.
Result<RequestLife> find_life(const std::string& path, uint64_t request);

}  // namespace xpyd::disagg
