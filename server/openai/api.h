// The OpenAI-compatible routes: what each method and path means. An HTTP request comes in; a JSON answer or an event
// stream goes out.
//
// Thread safety: the I/O thread owns everything here. Large bodies are parsed and tokenized on other threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

namespace boost::asio {
class thread_pool;
}

namespace xpyd::server {

// ---- Request bodies -> Requests (api_parse.cc). Plain functions of the body and of what the server serves. They can
// run on any thread, be fuzzed, and be tested without a socket.

// An error in a request, with the fields of OpenAI's error envelope.
struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the field that is wrong; "" = null
  std::string code;   // machine-readable, such as "context_length_exceeded"; "" = null
};

// The model that is served. Constant after the start.
struct ServedModel {
  std::string name = "model";            // its name in answers
  std::vector<std::string> other_names;  // other accepted names: the model's folder
  bool is_called(std::string_view wanted) const;
  const Tokenizer* tokenizer = nullptr;         // null: no text, only token ids
  const ChatTemplate* chat_template = nullptr;  // null: no chat
  int max_model_len = 0;                        // tokens of prompt and output together
  int vocab_size = 0;                           // token ids from clients must be below it and the tokenizer's size
  size_t kv_token_bytes = 0;                    // KV of one token
  size_t max_prompt_bytes = 0;                  // longer text cannot fit the context, however it is tokenized
  SipKey salt_key;
  SamplingParams sampling;  // defaults of sampling fields (model/generation_config.h)
};

ApiError unknown_model(const std::string& name, const ServedModel& model);

// Returns the most bytes of text that max_model_len tokens can hold, given the longest token.
size_t longest_prompt_bytes(const Tokenizer& tokenizer, int max_model_len);

struct GenerationCall {
  bool chat = false;
  bool stream = false, include_usage = false;
  bool echo = false, return_token_ids = false;
  bool prompt_logprobs = false;  // requested by this name, not by echo with logprobs
  bool prompt_only = false;      // echo with max_tokens 0: one token is generated but not returned
  bool has_seed = false;
  bool session_end = false;
  std::string session_id;                 // "" if none is named
  Sessions::Turn turn;                    // the hold on that session
  std::vector<ChatMessage> messages;      // chat in a session: history and new messages
  std::vector<Request> prompts;           // id, arrival and deadline not yet set
  std::vector<std::string> prompt_texts;  // with echo: one per prompt
  std::vector<std::string> ignored;       // unknown fields, for the log
};

constexpr int kMaxChoicesPerCall = 128;  // prompts times n
// Bound on prompt tokens times (prompt_logprobs + 1) in a call. It keeps an answer within 25 MB, and within a control
// frame.
constexpr size_t kMaxPromptLogprobs = size_t{1} << 19;
constexpr size_t kMaxStops = 64, kMaxStopBytes = 256, kMaxStopTokens = 64;

// Parses a completion (or chat) body into `out` and takes the named session's turn into out.turn. Null `sessions`: a
// session_id is refused.
std::optional<ApiError> parse_generation(std::string_view body, bool chat, const ServedModel& model,
                                         GenerationCall& out, Sessions* sessions = nullptr);

// Handle /tokenize and /detokenize. `answer` is the body of the answer.
std::optional<ApiError> tokenize(std::string_view body, const ServedModel& model, std::string& answer);
std::optional<ApiError> detokenize(std::string_view body, const ServedModel& model, std::string& answer);

// ---- The API key.

// True if the request has the header "Authorization: Bearer KEY" with this key. Takes equally long for right and wrong
// keys of one length.
bool has_key(const std::string& key, const HttpRequest& request);

// Reads the one key in a file. Error: it is not printable ASCII without blanks, or others than its owner can access the
// file.
Result<std::string> read_api_key(const std::string& path);

// ---- The routes.

struct ServerOptions : HttpListenOptions, ServedModel {
  std::string model_root;                  // shown in /v1/models; clients load a tokenizer from there
  double request_timeout_s = 600;          // of a whole request; 0: no limit
  std::string api_key_file;                // serve.cc reads it
  std::string api_key;                     // "": no key needed, and the listener must be on loopback
  std::vector<std::string> allowed_hosts;  // see object_to()
  int max_sessions = 1024;
  size_t session_bytes = size_t{64} << 20;
  uint64_t seed = 0;                         // from which requests without a seed get theirs
  std::function<void()> reset_prefix_cache;  // callable from any thread; empty: the route answers 501
  // POST /retire_instance {"name": "P0", "role": "decode"}. The instance leaves when it is empty and returns in that
  // role ("": it does not return). Callable from any thread.
  std::function<Status(const std::string& name, const std::string& role)> retire_instance;
  std::string switches = "[]";                  // for /stats, a JSON list: name, value, whether it was given
  LogLevel log_level = LogLevel::info;          // lowest level that is logged
  std::function<void(std::string)> log;         // writes one line without its end; empty: stderr
};

std::string error_body(const ApiError& error);
// The body of /stats, which the page draws (stats_body.cc): instances, their blocks by state, queues,
// transfers, the last answers.
std::string stats_body(const ServedModel& model, const ServiceStats& stats, const ServicePicture& picture = {},
                       const std::string& switches = "[]");

class Generation;

class Api final : public HttpHandler {
 public:
  Api(const ServerOptions& options, Service& service, const Tokenizer* tokenizer, const ChatTemplate* chat_template,
      Clock& clock, HttpPost post);
  ~Api() override;

  std::optional<HttpResponse> on_header(const HttpRequest& request) override;
  void handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override;
  HttpResponse refuse(int status, const std::string& why) override;
  void begin_drain() { draining_ = true; }

  // For the test that visits every route.
  struct Route {
    const char* path;
    const char* method;  // "GET", which also answers HEAD, or "POST"
    bool open;           // needs no key
    bool local;          // only for clients on this machine
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
  std::string model_card() const;
  // Sends the response. `why` is appended to the log line of a refusal.
  void answer(const Incoming& in, HttpResponse response, const std::string& why = "");
  void finish(const Row* row, HttpResponse& response, const std::string& why);
  void fail(const Incoming& in, const ApiError& error);
  // Runs `work`, off the I/O thread if the body is large. Then, on the I/O thread, answers with the error of `work`, or
  // runs the function that `work` stored in `then`.
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
  std::shared_ptr<Sessions> sessions_;
  Metrics metrics_;
  Random random_, id_random_;
  int64_t created_unix_s_;
  bool draining_ = false;
  uint64_t last_request_id_ = 0;
  std::unordered_map<Generation*, std::shared_ptr<Generation>> live_;  // calls not yet answered

  // Threads that parse and tokenize large bodies. The listener's bounds on connections and bodies also bound its queue.
  // Last member: joined before the others are destroyed.
  std::unique_ptr<boost::asio::thread_pool> body_threads_;
};

// One /v1/completions or /v1/chat/completions call. It submits the prompts, turns their events into stream events or
// one answer in OpenAI's JSON, and counts and logs the end.
//
// Thread safety: the I/O thread, except for the sinks, which engine threads call.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(Api& api, GenerationCall call, std::shared_ptr<HttpExchange> exchange, std::string id, double arrival_s);
  void start();
  // The HTTP status of the answer. 499: the client left first. 0: not answered yet.
  int status() const { return status_; }

 private:
  class Sink;
  // The part of a choice that an answer carries: all of it, or in a stream one token.
  struct Part {
    std::string text;
    bool with_logprobs = false;
    std::vector<Sampled> logprobs;  // one per token
    std::vector<int32_t> offsets;   // code points before each token's text
    std::vector<int32_t> token_ids;
    FinishReason finish = FinishReason::none;
  };
  struct Choice {
    Part part;                // not yet sent
    int32_t text_length = 0;  // code points so far
    int tokens = 0;
    bool began = false;  // a stream event of it has been sent
    FinishReason finish = FinishReason::none;
    std::string reply;  // in a session: the text that it keeps of this turn
    std::vector<int32_t> session_tokens;
    double last_token_s = 0;
  };
  struct Prompt {
    std::shared_ptr<const Request> request;
    int n_tokens() const { return int(request->prompt.size()); }
    int cached_tokens = 0;
    int ended = 0;                  // choices
    std::vector<Sampled> logprobs;  // of its tokens, if requested
    FinishedRequest seen;           // of the request so far
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
  std::string log_text() const;

  Api& api_;
  GenerationCall call_;
  std::shared_ptr<HttpExchange> exchange_;
  std::string id_;
  double arrival_s_;
  std::string shared_;  // of all answers: the fields between object and choices
  std::vector<Prompt> prompts_;
  std::vector<Choice> choices_;      // [prompt][n]
  size_t expected_ = 0, ended_ = 0;  // choices
  bool streaming_ = false;           // the stream's head is sent
  bool over_ = false;                // answered, failed or gone: nothing more to send
  int status_ = 0;
};

// The whole frontend: a listener and the routes, in front of a Service.
//
// Thread safety: run() on one thread. The others may be called from any thread, but not from a signal handler.
class HttpServer {
 public:
  // Binds the port and checks the options. Error: an address in use, named. Without a tokenizer only prompts of token
  // ids are served; without a template there is no chat. Everything passed by reference or pointer must live until the
  // service has ended its last request. Events after the server has gone are dropped.
  static Result<std::unique_ptr<HttpServer>> listen(const ServerOptions& options, Service& service,
                                                    const Tokenizer* tokenizer, const ChatTemplate* chat_template,
                                                    Clock& clock);
  void run() { listener_->run(*api_); }  // returns after stop() or at the end of a drain
  // New requests get 503. run() returns when all running requests are answered.
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
  std::unique_ptr<HttpListener> listener_;  // destroyed first: its connections call back into the api
};

}  // namespace xpyd::server
