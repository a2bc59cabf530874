// A cluster in virtual time: the server's conductor, instances, engines, KV memories and prefix caches, over a model that
// computes nothing and takes the seconds that a real one takes (hardware.h), and over links that are shared (links.h).
//
// Exact and repeatable. One thread; an instance's turn happens at once, by its own clock, which the step inside moves on:
// what it says is heard when its clock says so, and its next turn comes no earlier.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "batch/engine.h"
#include "disagg/conductor.h"
#include "disagg/simulate/hardware.h"

namespace xpyd::disagg {

struct SimulationOptions {
  Hardware hardware;
  SimulatedModel model;
  std::string topology = "1P1D";
  ConductorOptions conductor;
  EngineOptions engine;
  std::string scheme = "paged";
  int block_tokens = 512;
  double kv_tokens = 0;       // of one instance's pool; 0: what fits beside the weights
  double message_s = 50e-6;   // a control message's way
};

// One request of the load. Blocks that are equal after equal ones hold equal tokens.
struct SimulatedRequest {
  double arrival_s = 0;
  int prompt = 0, output = 0;    // tokens
  std::vector<uint64_t> blocks;  // of block_tokens each, the last one partial
};

struct SimulatedRecord {
  double first_s = -1, last_s = -1;  // when the client has its first token, and its last
  double worst_gap_s = 0;
  int tokens = 0, cached_tokens = 0;
};

struct Simulation {
  std::vector<SimulatedRecord> records;  // as the requests
  double end_s = 0, kv_gb = 0;           // sent from P to D
  int64_t events = 0, steps = 0, preemptions = 0;
  std::string wrong;  // empty: every request got its tokens, and nothing is held
};

Result<Simulation> simulate(const SimulationOptions& options, const std::vector<SimulatedRequest>& requests,
                            int trace_block_tokens);

}  // namespace xpyd::disagg
