// The /metrics page (Prometheus text format 0.0.4). Metrics have vLLM's names where the meaning is the same, so that
// its dashboards work. KV blocks by state and transfers have names of their own.
//
// Intervals are measured on this process's clock, so clocks of two machines are never subtracted:
//   TTFT       arrival at the frontend -> first token received here
//   ITL        token -> next token of the same choice, as received here
//   queue      arrival at the engine -> first step;  prefill: first step -> first token
//   decode     first -> last token;  inference: first step -> last token;  e2e: arrival -> last token
//
// Thread safety: none; the I/O thread owns it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "batch/request.h"
#include "disagg/service.h"

namespace xpyd::server {

class MetricsText;  // the text written so far (metrics.cc)

class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds)
      : bounds_(bounds.begin(), bounds.end()), counts_(bounds.size() + 1) {}
  void observe(double value);
  uint64_t count() const { return count_; }

 private:
  friend class MetricsText;
  std::vector<double> bounds_;    // upper bounds, inclusive, ascending
  std::vector<uint64_t> counts_;  // one more than bounds_: values above all bounds
  double sum_ = 0;
  uint64_t count_ = 0;
};

enum class RejectReason : uint8_t {
  invalid,       // any 400 except too_long
  too_long,      // prompt + max_tokens exceed the context
  unavailable,   // the cluster refused
  draining,      // shutting down
  overloaded,    // the frontend: every session that it can keep is in use
  unauthorized,  // no or wrong key
  unknown_model,
  objective,  // --admission: it would miss an SLO, or make others miss theirs
};

// One request (one prompt of an HTTP request) after its last event.
struct FinishedRequest {
  int n = 1;
  int prompt_tokens = 0, cached_tokens = 0;
  int max_tokens = 0;
  int preemptions = 0;         // sum over its choices
  std::vector<int> generated;  // tokens of each choice
  std::vector<FinishReason> finishes;
  double arrival_s = 0, queued_s = 0, scheduled_s = 0, first_token_s = 0, last_token_s = 0;
};

class Metrics {
 public:
  Metrics(std::string prefix, std::string model_name, int max_model_len)
      : prefix_(std::move(prefix)), model_name_(std::move(model_name)), tokens_(tokens_up_to(max_model_len)) {}
  // True if a --metrics-prefix can begin a metric's name.
  static bool valid_prefix(std::string_view prefix);

  void first_token(double ttft_s, int prompt_tokens, int cached_tokens);
  void generated_token() { ++generation_tokens_; }
  void inter_token(double seconds);
  void finished(const FinishedRequest& request);
  void rejected(RejectReason reason) { ++rejected_[static_cast<size_t>(reason)]; }
  // `handler` is one of our routes or "none", never a client's text.
  void http_request(std::string_view handler, std::string_view method, int status);

  std::string render(const ServiceStats& service) const;

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
  static constexpr double kN[] = {1, 2, 5, 10, 20};
  static constexpr double kPreemptions[] = {1, 2, 3, 4, 5, 10, 20};
  static std::vector<double> tokens_up_to(int max_tokens);

  // Parts of render() about the requests that this object has seen.
  void render_requests(MetricsText& text) const;
  void render_histograms(MetricsText& text) const;
  void render_process(MetricsText& text) const;

  std::string prefix_, model_name_;
  const std::vector<double> tokens_;  // bucket bounds
  Histogram ttft_{kTtft}, inter_token_{kInterToken}, time_per_token_{kInterToken};
  Histogram e2e_{kLatency}, queue_{kLatency}, prefill_{kLatency}, decode_{kLatency}, inference_{kLatency};
  Histogram preemptions_{kPreemptions}, n_{kN}, prompt_tokens_per_request_{tokens_};
  Histogram generation_tokens_per_request_{tokens_}, max_tokens_{tokens_}, max_generated_{tokens_};
  uint64_t prompt_tokens_ = 0, generation_tokens_ = 0, cached_prompt_tokens_ = 0;
  std::array<uint64_t, 7> finishes_{};  // by FinishReason
  std::array<uint64_t, 8> rejected_{};
  std::map<std::array<std::string, 3>, uint64_t> http_;  // handler, method, "2xx"
};

}  // namespace xpyd::server
