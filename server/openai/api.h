// The routes: what each (method, path) means. HTTP request in; JSON answer or event stream out.
//
// Thread safety: the I/O thread owns it; large bodies are parsed and tokenized on threads of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/json/json.h"
#include "base/log.h"
#include "base/random.h"
#include "base/siphash.h"
#include "base/status.h"
#include "batch/request.h"
#include "disagg/service.h"
#include "model/text/chat_template.h"
#include "model/text/tokenizer.h"
#include "server/http/http.h"
#include "server/openai/metrics.h"
#include "server/openai/sessions.h"

namespace xpyd::server {

// ---- request bodies -> Requests (api_parse.cc): plain functions of (body, what the server serves), so that they can
// run on any thread, be fuzzed and be tested without a socket

// What is wrong with a request, as OpenAI's error envelope says it.
struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the field; "" = null
  std::string code;   // for programs, as "context_length_exceeded"; "" = null
  RejectReason reason = RejectReason::invalid;
  double retry_s = 1;  // 429, 503: Retry-After
};

// What is served. Const after the start.
struct ServedModel {
  std::string name = "model";            // in answers
  std::vector<std::string> names;        // that clients see, `name` first; empty: it alone
  std::vector<std::string> other_names;  // that are answered, too: its folder
  bool is_called(std::string_view wanted) const;
  const Tokenizer* tokenizer = nullptr;         // null: no text, only token ids
  const ChatTemplate* chat_template = nullptr;  // null: no chat
  int max_model_len = 0;                        // tokens of prompt and output together
  int vocab_size = 0;                           // ids from clients are below it, and below the tokenizer's
  size_t max_prompt_bytes = 0;                  // a longer text cannot fit the context, whatever its tokens
  SipKey salt_key;
  bool speculates = false;
  std::vector<int> eos_tokens;  // min_tokens hold them back
  SamplingParams sampling;      // of a request that says nothing of it (model/generation_config.h)
};

ApiError unknown_model(const std::string& name, const ServedModel& model);

// The longest token bounds how much text max_model_len tokens can hold.
size_t longest_prompt_bytes(const Tokenizer& tokenizer, int max_model_len);

struct GenerationCall {
  bool chat = false;
  bool stream = false, include_usage = false, continuous_usage = false;
  bool echo = false, return_token_ids = false;
  bool prompt_logprobs = false;  // asked for by that name, rather than by echo with logprobs
  bool prompt_only = false;      // echo of no token more: one is generated, and not shown
  bool has_seed = false;
  bool session_end = false;
  std::string session_id;                 // where one is named
  Sessions::Turn turn;                    // of that session
  std::vector<ChatMessage> messages;      // chat in a session: so far and new
  std::vector<Request> prompts;           // id, arrival and deadline not yet set
  std::vector<std::string> prompt_texts;  // with echo: one for each prompt
  std::vector<std::string> ignored;       // fields that nobody here knows, for the log
};

// Bounds of the integer fields, in one table for the parser and its boundary test.
struct IntegerField {
  const char* name;
  int64_t min, max;
  bool completions, chat;
};
std::span<const IntegerField> integer_fields();

constexpr int kMaxChoicesPerCall = 128;  // prompts times n
// Prompt tokens of a call, each times its alternatives and itself: what an answer of 25 MB holds,
// and a control frame.
constexpr size_t kMaxPromptLogprobs = size_t{1} << 19;
constexpr size_t kMaxStops = 64, kMaxStopBytes = 256, kMaxStopTokens = 64;

// Takes the named conversation from `sessions` into out.turn. Null: session_id is refused.
std::optional<ApiError> parse_generation(std::string_view body, bool chat, const ServedModel& model,
                                         GenerationCall& out, Sessions* sessions = nullptr);

// /tokenize and /detokenize: the answer's body.
std::optional<ApiError> tokenize(std::string_view body, const ServedModel& model, std::string& answer);
std::optional<ApiError> detokenize(std::string_view body, const ServedModel& model, std::string& answer);

// ---- keys

// Of the request's "Authorization: Bearer KEY", the key's place among `keys`; -1: none of them. It
// takes as long for a wrong key as for a right one of the same length.
int key_owner(const std::vector<std::string>& keys, const HttpRequest& request);

bool is_api_key(const std::string& text);  // one that a header can carry
// One key on a line; empty lines and those that begin with # do not count. A file that others than
// its owner can read is refused.
Result<std::vector<std::string>> read_api_keys(const std::string& path);

// ---- the routes

struct ServerOptions : HttpListenOptions, ServedModel {
  std::string model_root;                    // in /v1/models; clients load a tokenizer from there
  std::string version;                       // in /version
  double request_timeout_s = 600;            // of a request as a whole; 0: none
  std::vector<std::string> api_keys;         // empty: open
  std::string api_key_file;                  // with more of them, for whoever reads it
  std::vector<std::string> allowed_hosts;    // see object_to()
  std::vector<std::string> allowed_origins;  // … and allows_origin()
  bool insecure = false;                     // without a key also on addresses that others can reach
  std::string metrics_prefix = "vllm";
  int max_sessions = 1024;  // conversations kept, and their bytes: of all keys
  size_t session_bytes = size_t{64} << 20;
  uint64_t seed = 0;                         // of the seeds of requests that bring none
  bool dev_endpoints = false;                // POST /reset_prefix_cache, GET /server_info, for clients on this machine
  std::function<void()> reset_prefix_cache;  // any thread; empty: that route answers 501
  // POST /retire_instance {"name": "P0", "role": "decode"}: that instance leaves when it is empty,
  // and comes back in that role ("": not at all). Any thread.
  std::function<Status(const std::string& name, const std::string& role)> retire_instance;
  std::string switches = "[]";                  // for /stats, a JSON list: name, value, whether it was given
  std::string server_info;                      // the option table, for GET /server_info
  LogLevel log_level = LogLevel::info;          // the least that is logged
  std::function<void(const std::string&)> log;  // one line without its end; empty: stderr
};

std::string error_body(const ApiError& error);
// What the page draws (stats_body.cc): instances, their blocks by state and place, queues, transfers, the last answers.
std::string stats_body(const ServedModel& model, const ServiceStats& stats, const ServicePicture& picture = {},
                       const std::string& switches = "[]");

// Threads on which request bodies are parsed and tokenized. One takes small ones alone, so that no
// number of large bodies is in their way; the others take large ones first, then small ones. What
// waits is bounded by the bytes of bodies that the listener holds.
//
// Thread safety: any thread.
class BodyThreads {
 public:
  ~BodyThreads();  // ends what runs, drops what waits
  void run(size_t body_bytes, std::function<void()> work);

 private:
  using Work = std::function<void()>;
  void loop(bool small_only);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> small_, large_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // started with the first body
};

class Generation;

class Api final : public HttpHandler {
 public:
  Api(const ServerOptions& options, Service& service, const Tokenizer* tokenizer, const ChatTemplate* chat_template,
      Clock& clock, HttpPost post);
  ~Api() override;

  std::optional<HttpResponse> on_header(const HttpRequest& request) override;
  void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override;
  HttpResponse refuse(int status, const std::string& why) override;
  void tick() override;
  void begin_drain() { draining_ = true; }

  // For the test that walks all routes.
  struct Route {
    const char* path;
    const char* methods;  // "GET", "POST" or "GET POST"; GET answers HEAD too
    bool open;            // needs no key
    bool dev;             // only with dev_endpoints, only for clients on this machine
  };
  static std::vector<Route> routes();

 private:
  friend class Generation;
  struct Incoming;
  struct Row;
  static std::span<const Row> table();

  const Row* find_row(const HttpRequest& request) const;  // null: no such path
  std::optional<HttpResponse> turn_away(const HttpRequest& request, const Row* row);
  static HttpResponse error_response(const ApiError& error);
  // What lets a page of that origin read the answer; empty where it may not, or where no page asks.
  HttpHeaders cross_origin(const HttpRequest& request) const;
  HttpResponse preflight(const HttpRequest& request) const;
  std::string model_card(const std::string& name) const;
  // `why` is appended to the log line of a refusal.
  void answer(const Incoming& in, HttpResponse response, const std::string& why = "");
  void finish(const HttpRequest& request, const Row* row, HttpResponse& response, const std::string& why);
  void fail(const Incoming& in, const ApiError& error);
  // Runs `work`, which may take long for a large body, off the I/O thread if so; then, on the I/O
  // thread, answers with its error, or runs what it has left in `then`.
  using Then = std::function<void()>;
  void on_body(const std::shared_ptr<Incoming>& in, std::function<std::optional<ApiError>(Then& then)> work);

  std::string trouble() const { return draining_ ? "draining" : service_.trouble(); }
  void generate(const std::shared_ptr<Incoming>& in, bool chat);
  void convert(const std::shared_ptr<Incoming>& in, decltype(tokenize)& text_or_ids);
  std::optional<ApiError> retire_instance(std::string_view body);

  void log_line(LogLevel level, const std::string& line);

  ServerOptions options_;
  Service& service_;
  Clock& clock_;
  HttpPost post_;
  const ServedModel& model_ = options_;
  std::vector<std::shared_ptr<Sessions>> sessions_;  // of each key; one without keys
  Metrics metrics_;
  Random random_, id_random_;
  int64_t created_unix_s_;
  bool draining_ = false;
  uint64_t last_request_id_ = 0;
  std::unordered_map<Generation*, std::shared_ptr<Generation>> live_;  // not yet answered
  double log_window_s_ = 0;                                            // start of the second in which lines are counted
  int log_lines_ = 0, log_dropped_ = 0;

  BodyThreads body_threads_;  // last: joined before the rest goes
};

// One /v1/completions or /v1/chat/completions call on its way: its prompts are submitted, their events come back as
// stream events or are gathered into one answer, in OpenAI's JSON, and its end is counted and logged.
//
// Thread safety: the I/O thread's, but for the sinks, which engine threads call.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // `headers`: of the answer, beside those that a Generation knows itself.
  Generation(Api& api, GenerationCall call, std::shared_ptr<HttpExchange> exchange, std::string id,
             std::string client_id, HttpHeaders headers, double arrival_s);
  void start();
  // Ends the call when the cluster has not done so well after its deadline; until then, a stream on which nothing has
  // come for kQuietSeconds says that it is there.
  void tick(double now);
  static constexpr double kQuietSeconds = 10;
  // The HTTP status it was answered with; 499: the client left first. 0: not yet.
  int status() const { return status_; }

 private:
  class Sink;
  // What an answer says of a choice: all of it, or in a stream one token.
  struct Part {
    std::string text;
    bool with_logprobs = false;
    std::vector<Sampled> logprobs;  // of each token
    std::vector<int32_t> offsets;   // code points before each token's text
    std::vector<int32_t> token_ids;
    FinishReason finish = FinishReason::none;
    std::string stop_text;  // why it stopped, when not by EOS
    int32_t stop_token = -1;
  };
  struct Choice {
    Part part;                // not yet sent
    int32_t text_length = 0;  // code points so far
    int tokens = 0;
    bool began = false;  // a stream event of it went out
    FinishReason finish = FinishReason::none;
    std::string reply;  // in a session: what it keeps of this turn
    std::vector<int32_t> session_tokens;
    double last_token_s = 0;
  };
  struct Prompt {
    std::shared_ptr<const Request> request;
    int ended = 0;                  // choices
    std::vector<Sampled> logprobs;  // of its tokens, where asked for
    FinishedRequest seen;           // of it so far
  };

  void on_event(size_t prompt, TokenEvent event, double received_s);
  void count(Prompt& prompt, Choice& choice, const TokenEvent& event, double received_s);
  void gather(Choice& choice, TokenEvent event);
  void echo(size_t prompt, Choice& choice) const;
  void stream(size_t prompt, size_t index);
  void remember(Choice& choice, const TokenEvent& event);
  void end_turn(bool whole);
  void complete();
  void fail(const ApiError& error);
  void on_gone();
  void abort_all();
  void end();
  void begin_stream();
  void send(std::string bytes);
  struct Usage {
    int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  };
  Usage usage() const;
  static void add_usage(JsonText& out, const Usage& usage);
  void add_choice(JsonText& out, size_t index, bool first) const;
  std::string answer(const std::string& choices_and_usage) const;
  HttpHeaders headers() const;
  std::string log_text(double now) const;

  Api& api_;
  GenerationCall call_;
  std::shared_ptr<HttpExchange> exchange_;
  std::string id_, client_id_;
  const HttpHeaders more_headers_;
  double arrival_s_;
  std::string shared_;  // of all answers: the fields between object and choices
  std::vector<Prompt> prompts_;
  std::vector<Choice> choices_;      // [prompt][n]
  size_t expected_ = 0, ended_ = 0;  // choices
  bool streaming_ = false;           // the stream's head is sent
  double sent_s_ = 0;                // Clock: the last bytes of the stream
  bool over_ = false;                // answered, failed or gone: nothing more to send
  int status_ = 0;
};

// The frontend as a whole: listener and routes in front of a Service.
//
// Thread safety: run() on one thread; the others from any (not from a signal handler).
class HttpServer {
 public:
  // Binds the port (an address in use is an error that names it) and checks the options. Without a tokenizer only
  // prompts of token ids are served, without a template no chat. Everything passed by reference or pointer must live
  // until the service has ended its last request; events that come after the server has gone are dropped.
  static Result<std::unique_ptr<HttpServer>> listen(const ServerOptions& options, Service& service,
                                                    const Tokenizer* tokenizer, const ChatTemplate* chat_template,
                                                    Clock& clock);
  void run() { listener_->run(*api_); }  // until stop(), or the end of a drain
  // 503 for new requests; run() returns when what runs is answered.
  void begin_drain() {
    listener_->post()([api = api_.get()] { api->begin_drain(); });
    listener_->begin_drain();
  }
  void stop() { listener_->stop(); }  // drops every connection; run() returns
  int port() const { return listener_->port(); }
  bool is_loopback() const { return listener_->is_loopback(); }

 private:
  HttpServer() = default;
  std::unique_ptr<Api> api_;
  std::unique_ptr<HttpListener> listener_;  // goes first: its connections call back into the api
};

}  // namespace xpyd::server
