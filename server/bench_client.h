// Sends a load to a completions endpoint and records what comes back. One thread.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "server/bench_result.h"
#include "server/datasets.h"
#include "server/http_client.h"

namespace xpyd::server {

// What the server says of itself in /v1/models.
struct ServerCard {
  std::string model, root;
  int max_model_len = 0;  // 0: it does not say
  int vocab = 0;          // 0: it does not say
};
// The card of `model`, or the first one when it is empty.
Result<ServerCard> read_server_card(HttpClient& client, const std::string& model);

// Tokens of a text, by the server's /tokenize.
Result<int> count_tokens(HttpClient& client, const std::string& model, const std::string& text);

struct SendOptions {
  std::string endpoint, model;
  double temperature = 0, timeout_s = 600;
  bool ignore_eos = true;
  bool keep_text = false;
  uint64_t seed = 0;  // request i samples with seed + i
  int vocab = 0;
  int max_concurrency = 0;  // 0: no limit
};

// The body of request i of the load.
std::string completion_body(const BenchRequest& request, int i, const SendOptions& options);

// Collects one answer: feed() takes body bytes as they arrive.
class AnswerReader {
 public:
  AnswerReader(RequestRecord& record, bool keep_text) : record_(record), keep_text_(keep_text) {}
  void feed(int status, std::string_view bytes, double now_s);
  void finish(const HttpOutcome& outcome, double now_s);

 private:
  void event(const std::string& data, double now_s);
  RequestRecord& record_;
  bool keep_text_;
  bool done_ = false;
  SseParser sse_;
  std::string error_body_;
};

// Sends requests[i] at start + due[i] (later while max_concurrency are in flight) until all are answered or `stop`
// becomes true. Records of requests that were not answered by then are left out.
struct LoadRun {
  std::vector<RequestRecord> records;
  double start_s = 0, duration_s = 0;
  int unanswered = 0;  // because of the stop
};
LoadRun send_load(HttpClient& client, const std::vector<BenchRequest>& requests, const std::vector<double>& due,
                  const SendOptions& options, Clock& clock,
                  const std::function<void(int done, int in_flight)>& on_progress, const std::atomic<bool>& stop);

}  // namespace xpyd::server
