// What the event log says of steps and requests, beside decisions (event_log.h): lines "step" and "request".
//
// Thread safety: plain values.
#pragma once

#include <string>
#include <vector>

#include "base/json_columns.h"

namespace xpyd::disagg {

// One step of one instance, or several that are alike (a simulation's).
struct StepLife {
  std::string instance;
  double t = 0, seconds = 0;  // Clock: when it began; how long it took
  int steps = 1;
  int tokens = 0;  // of prompts
  int decodes = 0;
  int64_t context = 0;                                    // tokens of KV that they look at
  int running = 0, waiting = 0;                           // sequences, after it
  int free = 0, active = 0, cached = 0, in_transfer = 0;  // blocks
};
template <class A>
void columns(A& a, Like<A, StepLife>& s) {
  a("instance", s.instance), a("t", s.t), a("seconds", s.seconds), a("steps", s.steps), a("tokens", s.tokens);
  a("decodes", s.decodes), a("context", s.context), a("running", s.running), a("waiting", s.waiting);
  a("free", s.free), a("active", s.active), a("cached", s.cached), a("in_transfer", s.in_transfer);
}

// One request, written when it has ended; of its first choice and last attempt. Clock seconds; 0: that never came.
struct RequestLife {
  uint64_t request = 0;
  double t = 0;       // it arrived
  double placed = 0;  // … and was given to instances, which are:
  std::string prefill, decode;
  double fetched = 0;  // its prefix is at P, from a peer or a tier
  double started = 0;  // P's first step with it begins
  double prompt_done = 0;
  double joined = 0;  // its KV is at D
  double first = 0;   // the client's first token
  double second = 0;  // D's first
  double ended = 0;
  int prompt = 0, cached = 0, output = 0, attempts = 0;  // tokens; tries
  double wire_bytes = 0;
  std::string finish;
  std::vector<float> gaps;  // between tokens, from the first on
};
template <class A>
void columns(A& a, Like<A, RequestLife>& s) {
  a("request", s.request), a("t", s.t), a("placed", s.placed), a("prefill", s.prefill), a("decode", s.decode);
  a("fetched", s.fetched), a("started", s.started), a("prompt_done", s.prompt_done), a("joined", s.joined);
  a("first", s.first), a("second", s.second), a("ended", s.ended), a("prompt", s.prompt), a("cached", s.cached);
  a("output", s.output), a("attempts", s.attempts), a("wire_bytes", s.wire_bytes), a("finish", s.finish);
  a("gaps", s.gaps);
}

// Where a request's first tokens' time went, in seconds; together `second` - `t`. What did not come is 0.
struct Attribution {
  double schedule = 0, queue = 0, fetch = 0, prefill = 0, transfer = 0, wait = 0;
};
// The row's names, and one request's row (Mooncake, FAST '25 figure 14).
std::string attribution_header();
std::string attribution_row(const RequestLife& life);
Attribution attribute(const RequestLife& life);

}  // namespace xpyd::disagg
