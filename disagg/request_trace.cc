#include "disagg/request_trace.h"

#include <algorithm>

namespace xpyd::disagg {

// Each mark ends the phase that began at the mark before it. A mark that is missing, or earlier than that, ends
// nothing. No phase goes beyond the last token that counts.
std::vector<Phase> phases(const RequestTrace& trace) {
  std::vector<Phase> all;
  const double last = trace.second > 0 ? trace.second : trace.first > 0 ? trace.first : trace.ended;
  double at = trace.t;
  const auto until = [&](double mark, size_t kind) {
    mark = std::min(mark, last);
    if (mark <= at) return;
    all.push_back({kind, at, mark});
    at = mark;
  };
  until(trace.placed, 0);
  until(std::min(trace.fetching, trace.started), 1);
  until(std::min(trace.fetched, trace.started), 2);
  until(trace.started, 1);
  until(trace.prompt_done > 0 ? trace.prompt_done : trace.first, 3);
  until(trace.granted, 4);
  until(trace.joined, 5);
  until(trace.decoding, 6);
  if (trace.first > 0) until(last, 7);
  return all;
}

std::array<double, kPhases.size()> attribute(const RequestTrace& trace) {
  std::array<double, kPhases.size()> seconds = {};
  for (const Phase& phase : phases(trace)) seconds[phase.kind] += phase.end_s - phase.begin_s;
  return seconds;
}

}  // namespace xpyd::disagg
