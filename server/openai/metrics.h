// The /metrics page (Prometheus text format 0.0.4). Metrics have vLLM's names where the meaning is the same, so that
// its dashboards work. KV blocks by state and transfers have names of their own.
//
// Intervals are measured on this process's clock, so clocks of two machines are never subtracted:
//   TTFT       arrival at the frontend -> first token received here
//   ITL        token -> next token of the same choice, as received here
//   queue      arrival at the engine -> first step;  prefill: first step -> first token
//   decode     first -> last token;  e2e: arrival -> last token
//
// Thread safety: none; the I/O thread owns it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "batch/request.h"
#include "disagg/service.h"
#include "server/openai/sessions.h"

namespace xpyd::server {

class Histogram {
 public:
  explicit Histogram(std::span<const double> upper) : bounds(upper), counts(upper.size() + 1) {}
  void observe(double value);

  const std::span<const double> bounds;  // upper bounds, inclusive, ascending
  std::vector<uint64_t> counts;          // one more than bounds: values above all bounds
  double sum = 0;
  uint64_t count = 0;
};

// One request (one prompt of an HTTP request) after its last event. Times are of one clock; 0: it has not happened.
struct FinishedRequest {
  std::vector<FinishReason> finishes;  // of each choice
  double arrival_s = 0, queued_s = 0, scheduled_s = 0, first_token_s = 0, last_token_s = 0;
};

class Metrics {
 public:
  explicit Metrics(std::string model_name, size_t kv_token_bytes = 0)
      : model_name_(std::move(model_name)), kv_token_bytes_(kv_token_bytes) {}

  void first_token(double ttft_s, int prompt_tokens);
  void generated_token() { ++generation_tokens_; }
  void inter_token(double seconds) { inter_token_.observe(seconds); }
  void finished(const FinishedRequest& request);
  // A turn of a session found no KV of its history, which has `tokens`. 0: it is the first turn.
  void history_computed(int tokens) { evicted_sessions_ += tokens > 0, evicted_tokens_ += uint64_t(tokens); }

  std::string render(const ServiceStats& service, const Sessions::Stats& sessions = {}) const;

 private:
  // vLLM's buckets, so that quantiles are comparable, and finer ones below them, because a small model's token takes
  // 0.2 ms.
  static constexpr double kTtft[] = {.0002, .0005, .001, .002, .005, .01, .02, .04, .06, .08, .1,  .25, .5,
                                     .75,   1,     2.5,  5,    7.5,  10,  20,  40,  80,  160, 640, 2560};
  static constexpr double kInterToken[] = {.00005, .0001, .0002, .0003, .0005, .001, .002, .005, .01,
                                           .025,   .05,   .075,  .1,    .15,   .2,   .3,   .4,   .5,
                                           .75,    1,     2.5,   5,     7.5,   10,   20,   40,   80};
  static constexpr double kLatency[] = {.001, .002, .005, .01, .02, .05, .1, .2, .3,  .5,  .8,  1,   1.5,  2,   2.5,
                                        5,    10,   15,   20,  30,  40,  50, 60, 120, 240, 480, 960, 1920, 7680};

  std::string model_name_;
  size_t kv_token_bytes_;
  Histogram ttft_{kTtft}, inter_token_{kInterToken};
  Histogram e2e_{kLatency}, queue_{kLatency}, prefill_{kLatency}, decode_{kLatency};
  uint64_t prompt_tokens_ = 0, generation_tokens_ = 0;
  uint64_t evicted_sessions_ = 0, evicted_tokens_ = 0;
  std::array<uint64_t, 7> finishes_{};  // by FinishReason
};

}  // namespace xpyd::server
