// A cluster in virtual time: the server's conductor, policies, instances and engines over the `local` wire, whose
// transfers arrive when a wire of a given rate would have carried them, and a model that takes the time of a real one
// on a real card (model/cost_model.h). What the KV holds is small, and checked: a token's rows follow from those of the
// token before, and the tokens put out from all layers.
//
// Exact and repeatable: threads take turns, one at a time, in the order of virtual time.
#pragma once

#include <string>
#include <vector>

#include "disagg/cluster.h"
#include "model/cost_model.h"

namespace xpyd::experiments {

// Llama-3.1-8B in bf16 (128 KiB of KV a token) on a card with half of 990 TFLOP/s and 0.8 of 3.35
// TB/s (H100 SXM, its data sheet).
CostModel timed_model_cost();
inline constexpr Rates kTimedRates = {0.5 * 990e12, 0.8 * 3.35e12};

struct TimedOptions {
  std::string topology = "1P1D";
  std::string disagg = "prefill_first";
  DisaggOptions disagg_options;
  StreamKv stream_kv = StreamKv::layer;
  double wire_gbps = 100;    // Gb/s, of each instance, in and out; 0: handoff
  double message_s = 50e-6;  // a control message's way
  double share = 1;          // of the card's arithmetic and bandwidth that each instance has
  int step_tokens = 2048;
  int max_batch = 64;
  int pool_tokens = 160000;  // KV of one instance
  uint64_t seed = 0;
};

struct TimedRequest {
  double arrival_s = 0;
  int prompt = 0, output = 0;  // tokens
};

struct TimedRecord {
  DisaggOrder order = DisaggOrder::local;
  double prompt_done_s = 0;     // its prompt's last step has ended (decode_first: without the last token)
  std::vector<double> token_s;  // when the client gets each
};

struct TimedRun {
  std::vector<TimedRecord> records;  // as the requests
  double end_s = 0;
  // The integral of the KV bytes held over time, on prefill and on all other instances, GB s.
  double prefill_gb_s = 0, decode_gb_s = 0;
  double wire_gb = 0;
  int64_t preemptions = 0, steps = 0;
  std::string wrong;  // empty: every request got its tokens, the right ones, and nothing is held
};

TimedRun run_timed(const TimedOptions& options, const std::vector<TimedRequest>& requests);

}  // namespace xpyd::experiments
