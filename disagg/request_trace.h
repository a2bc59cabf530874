// The traces of the event log beside its decisions (event_log.h): lines "step", "fetch", "store", "transfer" and
// "request". Times are Clock seconds.
//
// Thread safety: plain values.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/json/json_columns.h"

namespace xpyd::disagg {

// One step of one instance, or several steps together. The "plan" line before it names the requests.
struct StepTrace {
  std::string instance;
  double t = 0, seconds = 0;                              // when it began; how long it took
  int steps = 1;                                          // number of steps in this line
  int tokens = 0;                                         // prompt tokens
  double prefix = 0, attended = 0;                        // of these, as StepShape counts (model/cost/step_cost.h)
  int decodes = 0;                                        // decoding sequences
  int64_t context = 0;                                    // tokens of KV that these attend to
  int running = 0, waiting = 0;                           // sequences after the step
  int free = 0, active = 0, cached = 0, in_transfer = 0;  // blocks
  int evicted = 0;                                        // blocks evicted from the prefix cache since the line before
  double wire_s_per_byte = 0;                             // of the last transfers; 0: none yet
  // Of sparse layers since the line before, as ExpertLoad: rows of each expert and of each tensor rank; the mean of the
  // layers' imbalances.
  std::vector<int64_t> expert_rows, rank_rows;
  double imbalance = 0, exchanged_bytes = 0;
};
XPYD_COLUMNS(StepTrace, instance, t, seconds, steps, tokens, prefix, attended, decodes, context, running, waiting, free,
             active, cached, in_transfer, evicted, wire_s_per_byte, expert_rows, rank_rows, imbalance, exchanged_bytes)

// KV that a waiting request got from an offload tier or from another instance.
struct FetchTrace {
  std::string instance;
  uint64_t request = 0;
  double t = 0, seconds = 0;
  int tokens = 0;
  std::string from;               // the first of the instances that had it; "": an offload tier
  double worth_s = 0, bytes = 0;  // predicted seconds to compute it instead; bytes that were transferred
};
XPYD_COLUMNS(FetchTrace, instance, request, t, seconds, tokens, from, worth_s, bytes)

// KV that an instance copied to its host tier (StoredBlocks).
struct StoreTrace {
  std::string instance;
  double t = 0, seconds = 0;
  int blocks = 0;  // of the tier
  double bytes = 0;
};
XPYD_COLUMNS(StoreTrace, instance, t, seconds, blocks, bytes)

// A transfer of KV, from the first post() to the end of the last one, or one read.
struct TransferTrace {
  std::string kind, from, to;  // hand-over, fetch or copy; instances
  uint64_t request = 0;
  double t = 0, seconds = 0;
  int tokens = 0;
  double bytes = 0;
};
XPYD_COLUMNS(TransferTrace, kind, from, to, request, t, seconds, tokens, bytes)

// One request, written when it has ended. The times are those of its first choice and last attempt. 0: it did not
// happen.
struct RequestTrace {
  uint64_t request = 0;
  double t = 0;                 // the request arrived
  double placed = 0;            // the conductor chose these instances:
  std::string prefill, decode;  // prefill: "" until a P takes the prompt (decode_first)
  double started = 0;           // P's first step with it begins
  double prompt_done = 0;       // P has computed the prompt
  double granted = 0;           // D has reserved blocks for its KV
  double joined = 0;            // its KV is at D
  double first = 0;             // the client's first token
  double second = 0;
  double ended = 0;
  int prompt = 0, cached = 0, output = 0, attempts = 0;  // tokens; tries
  double kv_token_bytes = 0;                             // KV bytes of one token
  std::string finish;
  std::vector<float> gaps;  // seconds between tokens, from the first on
  // Not in the line. trace_view.cc takes them from lines of the instances.
  double fetching = 0, fetched = 0;  // P gets KV from an offload tier or another instance
  double decoding = 0;               // D's first step with it begins
};
XPYD_COLUMNS(RequestTrace, request, t, placed, prefill, decode, started, prompt_done, granted, joined, first, second,
             ended, prompt, cached, output, attempts, kv_token_bytes, finish, gaps)

// The phases of the time until a request's second token, because P samples the first one and D's share of the time
// shows in the second. `grant` is the wait for D's blocks after the prompt was computed, and `transfer` is the rest of
// the transfer after that. For a request with one token the phases end at that token.
inline constexpr std::array kPhases = {"schedule", "queue",    "fetch", "prefill",
                                       "grant",    "transfer", "wait",  "first_decode"};
struct Phase {
  size_t kind;  // into kPhases
  double begin_s, end_s;
};
// Returns the phases in order, without gaps. None is empty; a kind may occur twice.
std::vector<Phase> phases(const RequestTrace& trace);
std::array<double, kPhases.size()> attribute(const RequestTrace& trace);  // seconds of each kind

}  // namespace xpyd::disagg
