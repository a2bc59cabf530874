// xpyd bench sends a load to a completions endpoint, in one thread. Pure functions turn the client's records of the
// requests into figures.
//
// Definitions (kBenchDefinitions is printed with every result; vLLM's client has the same unless it says so):
//   send    just before the connection is opened
//   chunk   an event with non-empty `choices`, of a chat with some content, reasoning or tool call; the usage event
//           and [DONE] are none
//   TTFT    send to first chunk          ITL   gap between chunks, pooled over all requests
//   E2EL    send to last chunk           TPOT  (E2EL - TTFT) / (output tokens - 1), per request
//   TBT     the mean of a request's longest tenth of gaps (Mooncake, FAST '25 section 5.1; token_times.h)
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "experiments/load/datasets.h"
#include "experiments/stats.h"
#include "server/http/http_client.h"

namespace xpyd::server {

// ---- the figures (bench_result.cc)

extern const char* const kBenchDefinitions;

// One request as the client saw it. Times in seconds on one clock.
struct RequestRecord {
  double due_s = 0;             // when the arrival process wanted it sent
  double sent_s = 0;            // when it was sent
  double end_s = 0;             // when the connection ended, whatever the outcome
  std::vector<double> chunk_s;  // arrival of each chunk, ascending
  int input_tokens = 0;
  int output_tokens = 0;  // usage.completion_tokens; the number of chunks if the server sent no usage
  bool has_usage = false;
  std::string text;
  std::string error;          // "" = success
  bool refused = false;       // the server refused it because of an objective (429)
  double retry_after_s = -1;  // when the server wants to be asked again; below 0: it does not say
  bool ok() const { return error.empty(); }
};

// Limits of a good request in ms; infinite = no limit.
struct Goodput {
  double ttft_ms, tpot_ms, e2el_ms, tbt_ms;
  bool given = false;
  Goodput();
};
// Reads "ttft:200 tpot:50"; "" sets no limits.
Result<Goodput> parse_goodput(const std::string& text);

struct BenchResult {
  double duration_s = 0;                        // first arrival to last end
  int completed = 0, failed = 0, refused = 0;   // refused requests are not among the failed
  int without_usage = 0;                        // completed requests whose output was counted in chunks
  int64_t input_tokens = 0, output_tokens = 0;  // of the completed
  int64_t retokenized = -1;       // tokens of the answers' texts, counted by the server; below 0: not asked
  double request_throughput = 0;  // completed / s
  double request_goodput = 0;     // requests within all limits / s
  double slo_attainment = 0;      // requests within all limits / all requests, whatever their outcome
  double input_throughput = 0, output_throughput = 0, total_token_throughput = 0;  // tokens / s
  double concurrency = 0;              // mean over the duration: seconds of all requests / duration
  double max_output_tokens_per_s = 0;  // chunks in the fullest second
  int max_concurrent_requests = 0;
  Summary ttft_ms, tpot_ms, itl_ms, e2el_ms;  // of completed requests
  Summary tbt_ms, tbt_max_ms, tbt_p99_ms;     // per request: its longest tenth of gaps, longest gap, P99
  Summary retry_after_s;                      // of refused requests that have it
  Summary lateness_ms;  // from due to sent, of all requests: the client's own delay, and waits for max_concurrency
};

BenchResult summarize_bench(std::span<const RequestRecord> records, double start_s, double duration_s,
                            const Goodput& goodput);

// The settings that the table prints beside the figures.
struct BenchSetting {
  double request_rate = 0;  // infinite: all at once
  int max_concurrency = 0;  // 0: no limit
  bool has_goodput = false;
  std::string backend = "openai";  // SGLang's name for the protocol of the server
};

// A table of 50 columns with the rows of vLLM or of SGLang, followed by our rows for TBT.
std::string bench_table(const BenchResult& result, const BenchSetting& setting);
std::string sglang_table(const BenchResult& result, const BenchSetting& setting);

// The result with vLLM's keys.
nlohmann::json bench_json(const BenchResult& result);
// vLLM's detailed keys: arrays with one element per request. Times are in seconds.
nlohmann::json bench_details(std::span<const RequestRecord> records, double start_s);

// ---- the load (bench_client.cc)

// A server's description of itself in /v1/models.
struct ServerCard {
  std::string model, root;
  int max_model_len = 0;  // 0: not given
  int vocab = 0;          // 0: not given
};
// The card of `model`, or the first card if `model` is empty.
Result<ServerCard> read_server_card(HttpClient& client, const std::string& model);

// Number of tokens of a text, by the server's /tokenize.
Result<int> count_tokens(HttpClient& client, const std::string& model, const std::string& text);

// The options of a run, except its data set and its requests.
struct BenchOptions {
  std::string url, api_key, goodput, format;
  int warmups = 1;
  bool progress = true;  // shows a bar if stderr is a terminal
};

struct SendOptions {
  std::string endpoint, model;
  double temperature = 0, timeout_s = 600;
  bool ignore_eos = true;
  bool keep_text = false;
  uint64_t seed = 0;  // request i samples with seed + i
  int vocab = 0;
  int max_concurrency = 0;  // 0: no limit
};

// Each request is a chat with one message of the user, and the answer's text is in `delta`.
inline bool is_chat(const SendOptions& options) { return options.endpoint.ends_with("/chat/completions"); }
// Gives every request a text, because chats need one. The server's /detokenize makes it from the ids.
Status make_texts(HttpClient& client, const SendOptions& options, std::vector<BenchRequest>& requests);

// The request body of request i of the load.
std::string completion_body(const BenchRequest& request, int i, const SendOptions& options);

// Collects one answer. feed() takes bytes of the body as they arrive.
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

// Sends requests[i] at start + due[i]. A later request of a session is sent think_s after the end of request `after`,
// whether that one succeeded or not. While max_concurrency requests are in flight, sending waits. Returns when all
// requests are answered or `stop` becomes true; records of unanswered requests are left out.
struct LoadRun {
  std::vector<RequestRecord> records;
  double start_s = 0, duration_s = 0;
  int unanswered = 0;  // requests unanswered because of `stop`
};
LoadRun send_load(HttpClient& client, const std::vector<BenchRequest>& requests, const std::vector<double>& due,
                  const SendOptions& options, Clock& clock,
                  const std::function<void(int done, int in_flight)>& on_progress, const std::atomic<bool>& stop);

}  // namespace xpyd::server
