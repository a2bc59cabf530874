// A cluster in virtual time (experiments/simulate/) with the defaults of `xpyd simulate`, and its results as columns.
#pragma once

#include <string>
#include <vector>

#include "experiments/experiment.h"
#include "experiments/simulate/cluster.h"

namespace xpyd::experiments {

// Options with the trace's block size, steps of 2,048 tokens, 256 sequences at once, chunked batches, prefill first.
// The caller must set conductor.placement. Errors: a name that is in neither table.
Result<disagg::SimulationOptions> simulated(const std::string& hardware, const std::string& model,
                                            const std::string& topology, const disagg::Trace& trace);
void set_step_tokens(disagg::SimulationOptions& options, int tokens);

// One H100, or a `share` of it, that reaches half of its FLOP/s and 0.8 of its bandwidth, with Llama-3.1-8B in bf16,
// blocks of 16 tokens and 64 sequences. Requests go to the instance with the shortest queue. A step has no fixed cost.
disagg::SimulationOptions simulated_h100(const std::string& topology, const disagg::Trace& trace, double share = 1);
inline constexpr double kNoTransferTime = 1e15;  // bytes/s: transfers take no time

// A trace of Mooncake's release: conversation, synthetic or tool_agent. Where the folder of traces has no file of
// tool&agent, it is generated.
Result<disagg::Trace> mooncake_trace(const std::string& name, const Setting& setting,
                                     const disagg::TraceOptions& reading);
// The column `source` of a result: "generated" if a note of the trace says so, else "trace".
const char* source_of(const disagg::Trace& trace);

// Adds a request that shares no block with another one.
void add_request(disagg::Trace& trace, double arrival_s, int prompt, int output);
// The requests [first, first + n), or as many as there are. None of them waits for another one's end.
disagg::Trace window(const disagg::Trace& trace, size_t first, size_t n);
disagg::Trace faster(disagg::Trace trace, double times);
// How many instances the prompts keep busy, if no cache finds anything.
double prefill_load(const disagg::SimulationOptions& options, const disagg::Trace& trace);

// Records what a placement policy decides. Only one at a time.
struct Watched {
  double regret = 0;  // sum of regret_ratio
  int64_t decisions = 0;
  std::vector<double> tokens;                                      // tokens to compute, by instance
  double imbalance(const std::vector<disagg::Role>& roles) const;  // greatest / mean of those that prefill
};
const disagg::PlacementPolicy* watch(const std::string& placement, Watched& watched);

// "" if every request got all of its tokens, else a message.
std::string unserved(const disagg::Simulation& run, const disagg::Trace& trace);

// The columns of a result, "" where there are too few requests for a percentile. The TBT of a request is the mean of
// its longest tenth of gaps. Sets `wrong` if a request failed.
Values outcome(const disagg::Simulation& run, const disagg::Objectives& objectives, std::string& wrong);

}  // namespace xpyd::experiments
