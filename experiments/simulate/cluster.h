// A cluster in virtual time: the server's conductor, instances, engines, KV memories and prefix caches, over a model
// that computes nothing and takes the seconds that a real one takes (hardware.h), and over links that are shared
// (links.h).
//
// Exact and repeatable. One thread; an instance's turn happens at once, by its own clock, which the step inside moves
// on: what it says is heard when its clock says so, and its next turn comes no earlier.
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
  int prefill_pp = 1, decode_pp = 1;  // stages of an instance, each on cards of its own: `hardware` is one stage's
  int pipeline_window = 0;            // waves under way on them; 0: two for each
  std::string scheme = "paged";
  int block_tokens = 512;
  double kv_tokens = 0;       // of one instance's pool; 0: what fits beside the weights
  double host_tokens = 0;     // … and of its host memory below it
  bool load_by_cost = false;  // --kv-load
  bool fetch = true;          // an instance gets a prefix from another one where placement says so
  double message_s = 50e-6;   // a control message's way
  int output_tokens = -1;     // of every request; -1: the trace's
  bool answers = false;       // a session's next prompt has what was answered, as D has it; else other tokens
  double deadline_s = 0;      // of every request, after its arrival: then it ends as it is; 0: none
};

enum class SimulatedEnd : uint8_t { completed, refused, failed };

// One request, as its client saw it.
struct SimulatedRecord {
  double arrival_s = 0;
  TokenTimes times;
  int prompt = 0, cached = 0;  // tokens
  double last_s = 0;           // its end
  double prompt_done_s = -1;   // its prompt's last step has ended (decode_first: without the last token)
  DisaggOrder order = DisaggOrder::local;
  SimulatedEnd end = SimulatedEnd::failed;
  std::string why;  // refused, failed
};

struct Simulation {
  std::vector<SimulatedRecord> records;  // as the trace's requests
  double end_s = 0;
  double kv_gb = 0;  // sent between instances
  int64_t fetched_tokens = 0;
  std::vector<double> fetches_s;             // how long each fetched prefix was under way, by their ends
  double prefill_busy_s = 0;                 // steps of the instances that prefill
  double decode_busy_s = 0;                  // … and of those that only decode
  double prefill_gb_s = 0, decode_gb_s = 0;  // the integral of the KV that these hold
  double prompt_phase_gb_s = 0, decode_phase_gb_s = 0, transfer_phase_gb_s = 0;  // of all, as Spent tells it
  int64_t events = 0, steps = 0, preemptions = 0;
  int64_t prefill_evictions = 0;  // blocks that prefix caches lost, of instances that prefill
  ConductorStats conductor;
  PredictionError cost_error;
};

// Errors: invalid_argument: a topology that is none, a request that no instance's memory can hold.
Result<Simulation> simulate(const SimulationOptions& options, const Trace& trace);

// The columns that scripts read, as one JSON object; `wall_s` is the caller's.
std::string result_json(const Simulation& simulation, const Objectives& objectives, double wall_s);

}  // namespace xpyd::disagg
