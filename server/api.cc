#include "server/api.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>

#include "base/json.h"
#include "server/api_format.h"
#include "server/generation.h"
#include "server/json_text.h"
#include "server/page.h"

namespace xpyd {
namespace {

// Up to this a body is parsed and tokenized at once: about a millisecond. Beyond, on another
// thread.
constexpr size_t kInlineBodyBytes = 16u << 10;
constexpr int kLogLinesPerSecond = 500;
constexpr size_t kMaxClientIdBytes = 128;

std::string client_id(const HttpRequest& request) {
  std::string id(request.header("x-request-id"));
  bool good = id.size() <= kMaxClientIdBytes && std::all_of(id.begin(), id.end(), [](char c) {
                return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.' || c == ':';
              });
  return good ? id : "";
}

HttpResponse json_response(std::string body, int status = 200) { return {.status = status, .body = std::move(body)}; }

constexpr const char* kModelPrefix = "/v1/models/";

}  // namespace

struct Api::Row : Api::Route {
  void (Api::*handler)(const std::shared_ptr<Incoming>&);
};

struct Api::Incoming {
  HttpRequest request;
  std::shared_ptr<HttpExchange> exchange;
  const Row* row;
  double arrival_s;
};

std::span<const Api::Row> Api::table() {
  static constexpr Row kRows[] = {
      {{"/", "GET", true, false}, &Api::page},
      {{"/health", "GET", true, false}, &Api::health},
      {{"/ping", "GET POST", true, false}, &Api::health},
      {{"/ready", "GET", true, false}, &Api::ready},
      {{"/health/ready", "GET", true, false}, &Api::ready},
      {{"/version", "GET", false, false}, &Api::version},
      {{"/metrics", "GET", false, false}, &Api::metrics},
      {{"/stats", "GET", false, false}, &Api::stats},
      {{"/v1/models", "GET", false, false}, &Api::models},
      {{kModelPrefix, "GET", false, false}, &Api::model_by_id},
      {{"/v1/completions", "POST", false, false}, &Api::completions},
      {{"/v1/chat/completions", "POST", false, false}, &Api::chat_completions},
      {{"/tokenize", "POST", false, false}, &Api::tokenize_text},
      {{"/detokenize", "POST", false, false}, &Api::detokenize_ids},
      {{"/reset_prefix_cache", "POST", false, true}, &Api::reset_prefix_cache},
      {{"/retire_instance", "POST", false, true}, &Api::retire_instance},
      {{"/server_info", "GET", false, true}, &Api::server_info},
  };
  return kRows;
}

std::vector<Api::Route> Api::routes() { return {table().begin(), table().end()}; }

Api::Api(const ServerOptions& options, Service& service, const Tokenizer* tokenizer, const ChatTemplate* chat_template,
         Clock& clock, HttpPost post)
    : options_(options),
      service_(service),
      clock_(clock),
      post_(std::move(post)),
      metrics_(options.metrics_prefix, options.model_name, options.max_model_len),
      random_(options.seed),
      id_random_(random_word()),
      created_unix_s_(std::time(nullptr)) {
  model_.name = options.model_name;
  model_.names = options.more_names;
  model_.names.insert(model_.names.begin(), options.model_name);
  model_.other_names = options.other_names;
  model_.tokenizer = tokenizer;
  model_.chat_template = chat_template;
  model_.max_model_len = options.max_model_len;
  model_.vocab_size = options.vocab_size;
  if (tokenizer != nullptr) {
    if (model_.vocab_size == 0 || model_.vocab_size > tokenizer->vocab_size())
      model_.vocab_size = tokenizer->vocab_size();
    model_.max_prompt_bytes = longest_prompt_bytes(*tokenizer, options.max_model_len);
  }
  model_.salt_key = {random_word(), random_word()};
  // Nobody's conversations make room for another key's.
  const size_t owners = std::max<size_t>(1, options.api_keys.size());
  for (size_t i = 0; i < owners; ++i)
    sessions_.push_back(std::make_shared<Sessions>(std::max(1, options.max_sessions / static_cast<int>(owners)),
                                                   options.session_bytes / owners));
}

Api::~Api() = default;

// ---- every request
// --------------------------------------------------------------------------------

const Api::Row* Api::find_row(const HttpRequest& request) const {
  const Row* row = nullptr;
  for (const Row& candidate : table()) {
    bool hit = candidate.path == kModelPrefix ? request.path.starts_with(kModelPrefix) : request.path == candidate.path;
    if (hit) row = &candidate;
  }
  if (row != nullptr && row->dev && !(options_.dev_endpoints && request.from_loopback)) row = nullptr;
  return row;
}

bool Api::is_probe(const HttpRequest& request) {
  const Row* row = find_row(request);
  return row != nullptr && row->open;
}

std::optional<HttpResponse> Api::on_header(const HttpRequest& request) {
  const Row* row = find_row(request);
  auto refusal = turn_away(request, row);
  if (refusal) finish(request, row, *refusal, "");
  return refusal;
}

void Api::handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  const Row* row = find_row(request);
  (this->*row->handler)(
      std::make_shared<Incoming>(Incoming{std::move(request), std::move(exchange), row, clock_.now()}));
}

std::optional<HttpResponse> Api::turn_away(const HttpRequest& request, const Row* row) {
  const bool guarded = !options_.api_keys.empty() && (row == nullptr || !row->open);
  if (guarded && key_owner(options_.api_keys, request) < 0) {
    metrics_.rejected(RejectReason::unauthorized);
    HttpResponse response = error_response(
        {.status = 401,
         .message = "this server needs Authorization: Bearer KEY, with one of its keys",
         .code = "invalid_api_key"});
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
    return response;
  }
  if (const auto objection = object_to(request, options_.allowed_hosts)) return error_response(*objection);
  if (row == nullptr) return error_response({.status = 404, .message = "there is no such path"});
  std::string_view methods = row->methods;
  std::string_view method = request.method == "HEAD" ? "GET" : std::string_view(request.method);
  if ((method != "GET" && method != "POST") || methods.find(method) == methods.npos) {
    HttpResponse response = error_response({.status = 405, .message = std::string("this path takes ") + row->methods});
    std::string allow = methods == "POST" ? "POST" : "GET, HEAD";
    if (methods == "GET POST") allow += ", POST";
    response.headers.emplace_back("Allow", allow);
    return response;
  }
  if (methods != "POST" || !draining_) return {};
  metrics_.rejected(RejectReason::draining);
  HttpResponse response = error_response({.status = 503, .message = "the server is shutting down"});
  response.close = true;
  return response;
}

HttpResponse Api::error_response(const ApiError& error) const {
  HttpResponse response = json_response(error_body(error), error.status);
  // Benchmark clients record the reason phrase and nothing else.
  response.reason = std::string(http_reason(error.status)) + ": " + error.message.substr(0, 80);
  if (error.status == 503) response.headers.emplace_back("Retry-After", "1");
  if (error.status >= 500 && error.status != 503) response.headers.emplace_back("X-Should-Retry", "false");
  return response;
}

HttpResponse Api::refuse(int status, const std::string& why) {
  metrics_.http_request("none", "other", status);
  return error_response({.status = status, .message = why});
}

void Api::answer(const Incoming& in, HttpResponse response, const std::string& why) {
  finish(in.request, in.row, response, why);
  in.exchange->respond(std::move(response));
}

void Api::finish(const HttpRequest& request, const Row* row, HttpResponse& response, const std::string& why) {
  const char* path = row == nullptr ? "none" : row->path;
  metrics_.http_request(path, request.method, response.status);
  response.headers.emplace_back("X-Content-Type-Options", "nosniff");
  if (std::string id = client_id(request); !id.empty()) response.headers.emplace_back("X-Request-Id", id);
  if (response.status >= 400 || options_.log_level == LogLevel::debug)
    log_line(response.status >= 500   ? LogLevel::error
             : response.status >= 400 ? LogLevel::warning
                                      : LogLevel::debug,
             std::string(response.status >= 400 ? "refused" : "answered") + " route=" + std::string(path) +
                 " status=" + std::to_string(response.status) + why);
}

void Api::fail(const Incoming& in, const ApiError& error) {
  metrics_.rejected(error.reason);
  std::string why;
  if (!error.code.empty()) why += " code=" + error.code;
  if (!error.param.empty()) why += " param=" + error.param;
  answer(in, error_response(error), why);
}

void Api::on_body(const std::shared_ptr<Incoming>& in, std::function<std::function<void()>()> work) {
  // A session's history comes on top of a small body; \u may spell its name another way.
  const std::string& body = in->request.body;
  const bool is_short = body.size() <= kInlineBodyBytes && body.find("session_id") == body.npos &&
                        body.find("\\u") == body.npos;
  if (is_short) return work()();
  body_threads_.run(in->request.client, in->request.body.size(),
                    [post = post_, work = std::move(work)] { post(work()); });
}

void Api::tick() {
  double now = clock_.now();
  std::vector<std::shared_ptr<Generation>> all;
  for (auto& [key, generation] : live_) all.push_back(generation);
  for (auto& generation : all) generation->check_deadline(now);
}

// Wall-clock time (UTC), level, and what happened.
void Api::log_line(LogLevel level, const std::string& line) {
  if (level < options_.log_level) return;
  double now = clock_.now();
  auto write = [&](const std::string& text) { (options_.log ? options_.log : log_text)(log_stamp(level) + text); };
  if (now - log_window_s_ >= 1) {
    if (log_dropped_ > 0) write("log dropped_lines=" + std::to_string(log_dropped_));
    log_window_s_ = now;
    log_lines_ = log_dropped_ = 0;
  }
  if (++log_lines_ <= kLogLinesPerSecond)
    write(line);
  else
    ++log_dropped_;
}

// ---- the routes
// -----------------------------------------------------------------------------------

void Api::page(const std::shared_ptr<Incoming>& in) {
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.headers.emplace_back("Content-Security-Policy",
                                "default-src 'none'; style-src 'unsafe-inline'; script-src "
                                "'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
                                "form-action 'none'; frame-ancestors 'none'");
  response.headers.emplace_back("Cache-Control", "no-cache");
  response.body = std::string(page_html());
  answer(*in, std::move(response));
}

void Api::health(const std::shared_ptr<Incoming>& in) {
  const std::string why = trouble();
  JsonText json;
  json.open('{').key("status").text(why.empty() ? "ok" : draining_ ? "draining" : "unhealthy");
  if (!why.empty()) json.key("reason").text(why);
  answer(*in, json_response(json.close('}').take(), why.empty() ? 200 : 503));
}

// Ready: someone can prefill and someone can decode.
void Api::ready(const std::shared_ptr<Incoming>& in) {
  bool prefill = false, decode = false;
  for (const auto& instance : service_.stats().instances) {
    char role = instance.name.empty() ? '?' : instance.name[0];
    prefill = prefill || role == 'P' || role == 'C';
    decode = decode || role == 'D' || role == 'C';
  }
  const std::string why = trouble();
  JsonText json;
  json.open('{').key("status").text(why.empty() ? "ready" : "not ready");
  if (!why.empty()) json.key("reason").text(why);
  json.key("prefill").boolean(prefill).key("decode").boolean(decode).close('}');
  answer(*in, json_response(json.take(), why.empty() ? 200 : 503));
}

void Api::version(const std::shared_ptr<Incoming>& in) {
  answer(*in, json_response("{\"version\":" + json_quote(options_.version) + "}"));
}

void Api::metrics(const std::shared_ptr<Incoming>& in) {
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = metrics_.render(service_.stats());
  answer(*in, std::move(response));
}

void Api::stats(const std::shared_ptr<Incoming>& in) {
  HttpResponse response = json_response(stats_body(model_, service_.stats()));
  response.headers.emplace_back("Cache-Control", "no-store");
  answer(*in, std::move(response));
}

void Api::models(const std::shared_ptr<Incoming>& in) {
  answer(*in, json_response(models_body(model_, options_.model_root, created_unix_s_)));
}

void Api::model_by_id(const std::shared_ptr<Incoming>& in) {
  const std::string name = in->request.path.substr(std::string_view(kModelPrefix).size());
  if (model_.is_called(name))
    return answer(*in, json_response(model_card(model_, name, options_.model_root, created_unix_s_)));
  fail(*in, unknown_model(name, model_));
}

void Api::completions(const std::shared_ptr<Incoming>& in) { generate(in, false); }
void Api::chat_completions(const std::shared_ptr<Incoming>& in) { generate(in, true); }

void Api::generate(const std::shared_ptr<Incoming>& in, bool chat) {
  on_body(in, [this, in, chat]() -> std::function<void()> {
    auto call = std::make_shared<GenerationCall>();
    const int owner = std::max(0, key_owner(options_.api_keys, in->request));
    auto error = parse_generation(in->request.body, chat, model_, *call, sessions_[static_cast<size_t>(owner)].get());
    in->request.body = std::string();
    if (error) return [this, in, error = std::move(*error)] { fail(*in, error); };
    return [this, in, chat, call] {
      in->exchange->body_freed();
      char id[40];
      std::snprintf(id, sizeof id, "%s-%016llx%08llx", chat ? "chatcmpl" : "cmpl",
                    static_cast<unsigned long long>(id_random_.next()),
                    static_cast<unsigned long long>(id_random_.next() >> 32));
      auto generation = std::make_shared<Generation>(*this, std::move(*call), in->exchange, id, client_id(in->request),
                                                     in->arrival_s);
      live_[generation.get()] = generation;
      generation->start();
    };
  });
}

void Api::tokenize_text(const std::shared_ptr<Incoming>& in) { convert(in, tokenize); }
void Api::detokenize_ids(const std::shared_ptr<Incoming>& in) { convert(in, detokenize); }

void Api::convert(const std::shared_ptr<Incoming>& in, decltype(tokenize)& text_or_ids) {
  on_body(in, [this, in, &text_or_ids]() -> std::function<void()> {
    std::string body;
    auto error = text_or_ids(in->request.body, model_, body);
    if (error) return [this, in, error = std::move(*error)] { fail(*in, error); };
    return [this, in, body = std::move(body)] { answer(*in, json_response(body)); };
  });
}

void Api::reset_prefix_cache(const std::shared_ptr<Incoming>& in) {
  if (options_.reset_prefix_cache) {
    options_.reset_prefix_cache();
    return answer(*in, json_response("{}"));
  }
  fail(*in, {.status = 501, .message = "this memory scheme has no prefix cache"});
}

void Api::retire_instance(const std::shared_ptr<Incoming>& in) {
  on_body(in, [this, in]() -> std::function<void()> {
    auto fails = [&](int status, const std::string& message) {
      return [this, in, error = ApiError{.status = status, .message = message}] { fail(*in, error); };
    };
    auto body = parse_json(in->request.body, "request body");
    if (!body) return fails(400, body.error().message);
    auto name = get_string(body.value(), "name");
    if (!name) return fails(400, name.error().message);
    std::string role;
    if (body.value().contains("role")) {
      auto text = get_string(body.value(), "role");
      if (!text) return fails(400, text.error().message);
      role = text.value();
      if (role != "prefill" && role != "decode" && role != "colocated")
        return fails(400, "role: expected prefill, decode or colocated, got " + role);
    }
    const Status retired = options_.retire_instance(name.value(), role);
    if (!retired) return fails(retired.error().code == ErrorCode::not_found ? 404 : 400, retired.error().message);
    return [this, in] { answer(*in, json_response("{}")); };
  });
}

void Api::server_info(const std::shared_ptr<Incoming>& in) {
  answer(*in, json_response("{\"options\":" + json_quote(options_.server_info) + "}"));
}

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const ServerOptions& options, Service& service,
                                                       const Tokenizer* tokenizer, const ChatTemplate* chat_template,
                                                       Clock& clock) {
  if (!Metrics::valid_prefix(options.metrics_prefix))
    return invalid("metrics prefix \"" + options.metrics_prefix +
                   "\": expected letters, digits and '_', not beginning with a digit");
  if (options.max_model_len < 2)
    return invalid("max_model_len " + std::to_string(options.max_model_len) + ": expected at least 2 tokens");
  auto listener = HttpListener::open(options);
  if (!listener.ok()) return listener.error();
  if (options.api_keys.empty() && !options.insecure && !listener.value()->is_loopback())
    return invalid("--host " + options.host +
                   ": others can reach this address: expected --api-key-file, or --insecure where "
                   "all of them may use the server");
  auto server = std::unique_ptr<HttpServer>(new HttpServer());
  server->listener_ = std::move(listener).value();
  server->api_ = std::make_unique<Api>(options, service, tokenizer, chat_template, clock, server->listener_->post());
  return server;
}

void HttpServer::run() { listener_->run(*api_); }

void HttpServer::begin_drain() {
  listener_->post()([api = api_.get()] { api->begin_drain(); });
  listener_->begin_drain();
}

void HttpServer::stop() { listener_->stop(); }

}  // namespace xpyd
