// Sums over all requests that have this sink, for experiments, benchmarks and tests that look at a run's outcome and
// not at its events.
//
// Thread safety: one thread, that of the engine or of the cluster.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "batch/request.h"

namespace xpyd::experiments {

class Tally final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    tokens += event.token >= 0;
    if (event.request_id != std::exchange(last_request, event.request_id)) last_tokens.clear();
    if (event.token >= 0) last_tokens.push_back(event.token);
    text += event.text;
    finish = event.finish;
    if (finish == FinishReason::none) return;
    ++ended;
    ++by_reason[size_t(finish)];
    if (finish != FinishReason::length)
      wrong = std::string("a request ended by ") + finish_reason_name(finish) + " " + event.error;
    cached_tokens += event.cached_tokens;
    logits_hash += event.logits_hash;
    if (event.request_id < end_s.size()) end_s[event.request_id] = event.time_s;
  }
  int ended_by(FinishReason reason) const { return by_reason[size_t(reason)]; }

  int64_t tokens = 0, cached_tokens = 0;
  int ended = 0;  // number of ended choices
  std::array<int, 6> by_reason{};
  uint64_t logits_hash = 0;   // of all choices, in any order
  std::vector<double> end_s;  // by request id, as far as the caller has made room
  uint64_t last_request = 0;
  std::vector<int32_t> last_tokens;  // of the last event's request, if no other request's events come between
  std::string text, wrong;
  FinishReason finish = FinishReason::none;  // of the last event
};

}  // namespace xpyd::experiments
