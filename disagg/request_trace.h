// What the event log says of steps, transfers and requests, beside decisions (event_log.h): lines "step", "fetch",
// "transfer" and "request". Times are Clock seconds.
//
// Thread safety: plain values.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/json/json_columns.h"

namespace xpyd::disagg {

// One step of one instance. Whose tokens it has is in the "plan" before it.
struct StepTrace {
  std::string instance;
  double t = 0, seconds = 0;  // when it began; how long it took
  int steps = 1;
  int tokens = 0;                   // of prompts
  double prefix = 0, attended = 0;  // of them, as model/cost/step_cost.h counts them
  int decodes = 0;
  int64_t context = 0;                                    // tokens of KV that they look at
  int running = 0, waiting = 0;                           // sequences, after it
  int free = 0, active = 0, cached = 0, in_transfer = 0;  // blocks
  int evicted = 0;                                        // of them, from its prefix cache, since the step before
  double wire_s_per_byte = 0;                             // of its last posts; 0: none yet
};
XPYD_COLUMNS(StepTrace, instance, t, seconds, steps, tokens, prefix, attended, decodes, context, running, waiting, free,
             active, cached, in_transfer, evicted, wire_s_per_byte)

// KV of a request that an instance had in a tier, or another one had, and that has come while the request waited.
struct FetchTrace {
  std::string instance;
  uint64_t request = 0;
  double t = 0, seconds = 0;
  int tokens = 0;
  std::string from;               // the first of the instances that had it; "": a tier
  double worth_s = 0, bytes = 0;  // … what computing it was said to take; what crossed
};
XPYD_COLUMNS(FetchTrace, instance, request, t, seconds, tokens, from, worth_s, bytes)

// KV of a prompt that crossed a wire: from its first post to the end of its last one.
struct TransferTrace {
  std::string from, to;  // instances
  uint64_t request = 0;
  double t = 0, seconds = 0;
  int tokens = 0;
  double bytes = 0;
};
XPYD_COLUMNS(TransferTrace, from, to, request, t, seconds, tokens, bytes)

// One request, written when it has ended; of its first choice and last attempt. 0: that never came.
struct RequestTrace {
  uint64_t request = 0;
  double t = 0;       // it arrived
  double placed = 0;  // … and was given to instances, which are:
  std::string prefill, decode;
  double started = 0;  // P's first step with it begins
  double prompt_done = 0;
  double granted = 0;  // D has room for its KV
  double joined = 0;   // its KV is at D
  double first = 0;    // the client's first token
  double second = 0;
  double ended = 0;
  int prompt = 0, cached = 0, output = 0, attempts = 0;  // tokens; tries
  double kv_token_bytes = 0;                             // of KV memory
  std::string finish;
  std::vector<float> gaps;  // between tokens, from the first on
  // By lines of its instances (trace_view.cc).
  double fetching = 0, fetched = 0;  // P gets what a tier, or another instance, has of it
  double decoding = 0;               // D's first step with it begins
};
XPYD_COLUMNS(RequestTrace, request, t, placed, prefill, decode, started, prompt_done, granted, joined, first, second,
             ended, prompt, cached, output, attempts, kv_token_bytes, finish, gaps)

// Where the time until a request's second token went. `grant` is the wait for D's room after the prompt is computed,
// and `transfer` what is left of the bytes' time then. P brings the first one, and D's part shows in the second. Of a
// request that has one token, until that.
inline constexpr std::array kPhases = {"schedule", "queue",    "fetch", "prefill",
                                       "grant",    "transfer", "wait",  "first_decode"};
struct Phase {
  size_t kind;  // into kPhases
  double begin_s, end_s;
};
// In order, without a gap; none is empty.
std::vector<Phase> phases(const RequestTrace& trace);
std::array<double, kPhases.size()> attribute(const RequestTrace& trace);  // seconds of each

// KV memory that a request held, in byte seconds, its cached prefix counted: on P from its first step until its KV was
// at D, on D from the grant until its end. Tokens are taken to come evenly between two marks. One instance for both is
// D.
struct HeldKv {
  double prefill = 0, decode = 0;
};
HeldKv held_kv(const RequestTrace& trace);
// A row's names, one request's row (Mooncake, FAST '25 figure 14), and the same in words.
std::string attribution_header();
std::string attribution_row(const RequestTrace& trace);
std::string attribution_line(const RequestTrace& trace);

}  // namespace xpyd::disagg
