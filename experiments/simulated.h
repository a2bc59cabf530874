// A cluster in virtual time (experiments/simulate/), asked as `xpyd simulate` asks it, and what experiments tell of a
// run.
#pragma once

#include <string>
#include <vector>

#include "experiments/experiment.h"
#include "experiments/simulate/cluster.h"

namespace xpyd::experiments {

// Blocks as the trace has them, steps of 2,048 tokens, 256 sequences at once, chunked batches, prefill first. To be
// chosen: conductor.placement. Errors: a name that is in neither table.
Result<disagg::SimulationOptions> simulated(const std::string& hardware, const std::string& model,
                                            const std::string& topology, const disagg::Trace& trace);
void set_step_tokens(disagg::SimulationOptions& options, int tokens);

// One H100 (or a `share` of it) that reaches half of its FLOP/s and 0.8 of its bandwidth, with Llama-3.1-8B in bf16;
// blocks of 16 tokens, 64 sequences, each to the instance with the shortest queue; a step costs nothing but its work.
disagg::SimulationOptions simulated_h100(const std::string& topology, const disagg::Trace& trace, double share = 1);
inline constexpr double kNoWire = 1e15;  // bytes/s: what crosses is there

// A request that has nothing in common with any other.
void add_request(disagg::Trace& trace, double arrival_s, int prompt, int output);
// Requests [first, first + n) alone, or as many as there are; nobody waits for another's end.
disagg::Trace window(const disagg::Trace& trace, size_t first, size_t n);
disagg::Trace faster(disagg::Trace trace, double times);
// How many of one instance the prompts keep busy, if nothing is found in any cache.
double prefill_load(const disagg::SimulationOptions& options, const disagg::Trace& trace);

// Watches a placement policy while it decides. One at a time.
struct Watched {
  double regret = 0;  // sum of regret_ratio
  int64_t decisions = 0;
  std::vector<double> tokens;                                      // to be computed, by instance
  double imbalance(const std::vector<disagg::Role>& roles) const;  // most / mean of those that compute prompts
};
const disagg::PlacementPolicy* watch(const std::string& placement, Watched& watched);

// What is wrong: a request did not get all of its tokens. "": nothing.
std::string unserved(const disagg::Simulation& run, const disagg::Trace& trace);

// Columns; "" where there are too few requests for a percentile. Of a request's TBT: the mean of its longest tenth of
// gaps. `wrong`: a request failed.
Values outcome(const disagg::Simulation& run, const disagg::Objectives& objectives, std::string& wrong);

}  // namespace xpyd::experiments
