// A cluster in virtual time: the server's conductor, instances, engines, KV memories and prefix caches. Two things are
// replaced. The model computes nothing and takes the seconds that a real model takes (hardware.h), and the links share
// their bandwidth between transfers (links.h).
//
// Equal options and traces give equal results. One thread runs everything. An instance's turn runs at once, but by the
// instance's own clock, which a step moves forward. Its messages arrive when that clock says so, and its next turn
// starts no earlier.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "batch/engine/engine.h"
#include "disagg/conductor/conductor.h"
#include "disagg/conductor/token_times.h"
#include "experiments/simulate/hardware.h"
#include "experiments/simulate/routers.h"
#include "experiments/simulate/traces.h"

namespace xpyd::disagg {

struct SimulationOptions {
  Hardware hardware;
  SimulatedModel model;
  std::string topology = "1P1D";
  ConductorOptions conductor;
  RouterOptions routers;
  EngineOptions engine;
  int prefill_pp = 1, decode_pp = 1;  // pipeline stages of an instance; each has its own cards, as `hardware` says
  int pipeline_window = 0;            // waves under way in such a pipeline; 0: two for each stage
  std::string scheme = "paged";
  int block_tokens = 512;
  double kv_tokens = 0;      // in the pool of one instance; 0: what fits beside the weights
  double host_tokens = 0;    // in the host memory of one instance
  bool fetch = true;         // an instance fetches a prefix from another one where placement says so
  double message_s = 50e-6;  // one-way time of a control message
  int output_tokens = -1;    // of every request; -1: as the trace says
  bool answers = false;      // a session's next prompt contains the previous answer, as D has it; else other tokens
  double deadline_s = 0;  // of every request, counted from its arrival; the request ends then with what it has; 0: none
};

enum class SimulatedEnd : uint8_t { completed, refused, failed };

// One request, as its client sees it.
struct SimulatedRecord {
  double arrival_s = 0;
  TokenTimes times;
  int prompt = 0, cached = 0;  // tokens
  double last_s = 0;           // when its last event came
  double prompt_done_s = -1;   // when the last step of its prompt ended (decode_first: without the last token)
  DisaggOrder order = DisaggOrder::local;
  SimulatedEnd end = SimulatedEnd::failed;
  std::string why;  // why it was refused or failed
};

struct Simulation {
  std::vector<SimulatedRecord> records;  // in the order of the trace's requests
  double end_s = 0;
  double kv_gb = 0;  // sent between instances
  int64_t fetched_tokens = 0;
  std::vector<double> fetches_s;             // duration of each fetch of a prefix, in the order in which they end
  double prefill_busy_s = 0;                 // time in steps, of instances that prefill
  double decode_busy_s = 0;                  // time in steps, of instances that only decode
  double prefill_gb_s = 0, decode_gb_s = 0;  // integral over time of the KV that these instances hold
  double prompt_phase_gb_s = 0, decode_phase_gb_s = 0, transfer_phase_gb_s = 0;  // of all, as in Spent
  int64_t events = 0, steps = 0, preemptions = 0;
  int64_t prefill_evictions = 0;  // blocks evicted from prefix caches, of instances that prefill
  ConductorStats conductor;
  PredictionError cost_error;
};

// Errors: invalid_argument if the topology is malformed, stages do not divide the layers, or no KV pool fits. A request
// that no instance can hold is no error: its record says `failed`, and why.
Result<Simulation> simulate(const SimulationOptions& options, const Trace& trace);

// The columns that scripts read, as one JSON object. The caller measures `wall_s`.
std::string result_json(const Simulation& simulation, const Objectives& objectives, double wall_s);

}  // namespace xpyd::disagg
