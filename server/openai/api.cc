#include "server/openai/api.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/numbers.h"
#include "disagg/net/hello.h"

extern "C" const char xpyd_page_begin[], xpyd_page_end[];  // page.cc

namespace xpyd::server {
namespace {

// Bodies up to this size are parsed and tokenized on the I/O thread: about a millisecond. Longer ones go to other
// threads.
constexpr size_t kInlineBodyBytes = 16u << 10;
constexpr size_t kSmallBodyBytes = 128u << 10;  // about 10 ms
constexpr size_t kMaxClientIdBytes = 128;

constexpr size_t kMaxKeyFileBytes = 1u << 20;

// Compares digests, so that the time says nothing about the keys or their lengths.
bool equal_keys(std::string_view a, std::string_view b) {
  return equal_in_constant_time(hmac_sha256("", a), hmac_sha256("", b));
}

std::string client_id(const HttpRequest& request) {
  std::string id(request.header("x-request-id"));
  bool good = id.size() <= kMaxClientIdBytes && std::all_of(id.begin(), id.end(), [](char c) {
                return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.' || c == ':';
              });
  return good ? id : "";
}

HttpResponse json_response(std::string body, int status = 200) { return {.status = status, .body = std::move(body)}; }

constexpr const char* kModelPrefix = "/v1/models/";

const char* error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 404: return "not_found_error";
    case 503: return "overloaded_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

}  // namespace

std::string error_body(const ApiError& error) {
  auto text_or_null = [](const std::string& text) { return text.empty() ? "null" : json_quote(text); };
  JsonText out;
  out.open('{').key("error").open('{').add("message", error.message, "type", error_type(error.status));
  out.key("param").raw(text_or_null(error.param)).key("code").raw(text_or_null(error.code));
  return out.close('}').close('}').take();
}

struct Api::Row : Api::Route {
  void (*handle)(Api& api, const std::shared_ptr<Incoming>& in);
};

struct Api::Incoming {
  HttpRequest request;
  std::shared_ptr<HttpExchange> exchange;
  const Row* row;
  double arrival_s;
};

// This function stays whole because it is one table. Routes of a few lines stand before it.
std::span<const Api::Row> Api::table() {
  using In = std::shared_ptr<Incoming>;
  static constexpr auto health = [](Api& api, const In& in) {
    const std::string why = api.trouble();
    JsonText out;
    out.open('{').add("status", why.empty() ? "ok" : api.draining_ ? "draining" : "unhealthy");
    if (!why.empty()) out.add("reason", why);
    api.answer(*in, json_response(out.close('}').take(), why.empty() ? 200 : 503));
  };
  // Ready: some instance can prefill and some instance can decode.
  static constexpr auto ready = [](Api& api, const In& in) {
    std::string roles;
    for (const auto& instance : api.service_.stats().instances) roles += instance.name.substr(0, 1);
    const std::string why = api.trouble();
    JsonText out;
    out.open('{').add("status", why.empty() ? "ready" : "not ready");
    if (!why.empty()) out.add("reason", why);
    out.add("prefill", roles.find_first_of("PC") != roles.npos, "decode", roles.find_first_of("DC") != roles.npos);
    api.answer(*in, json_response(out.close('}').take(), why.empty() ? 200 : 503));
  };
  static constexpr auto page = [](Api& api, const In& in) {
    constexpr const char* kPolicy =
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    api.answer(*in, {.content_type = "text/html; charset=utf-8",
                     .headers = {{"Content-Security-Policy", kPolicy}, {"Cache-Control", "no-cache"}},
                     .body = {xpyd_page_begin, xpyd_page_end}});
  };
  static constexpr auto version = [](Api& api, const In& in) {
    api.answer(*in, json_response(JsonText().object("version", api.options_.version).take()));
  };
  static constexpr auto metrics = [](Api& api, const In& in) {
    api.answer(*in, {.content_type = "text/plain; version=0.0.4; charset=utf-8",
                     .body = api.metrics_.render(api.service_.stats())});
  };
  static constexpr auto stats = [](Api& api, const In& in) {
    api.answer(*in,
               {.headers = {{"Cache-Control", "no-store"}},
                .body = stats_body(api.model_, api.service_.stats(), api.service_.picture(), api.options_.switches)});
  };
  static constexpr auto models = [](Api& api, const In& in) {
    JsonText out;
    out.open('{').add("object", "list").key("data").open('[');
    for (const std::string& name : api.model_.names) out.raw(api.model_card(name));
    api.answer(*in, json_response(out.close(']').close('}').take()));
  };
  static constexpr auto model_by_id = [](Api& api, const In& in) {
    const std::string name = in->request.path.substr(std::string_view(kModelPrefix).size());
    if (name.empty()) return models(api, in);
    if (api.model_.is_called(name)) return api.answer(*in, json_response(api.model_card(name)));
    api.fail(*in, unknown_model(name, api.model_));
  };
  static constexpr auto reset_prefix_cache = [](Api& api, const In& in) {
    if (!api.options_.reset_prefix_cache)
      return api.fail(*in, {.status = 501, .message = "this server's allocator has no prefix cache"});
    api.options_.reset_prefix_cache();
    api.answer(*in, json_response("{}"));
  };
  static constexpr auto retire_instance = [](Api& api, const In& in) {
    api.on_body(in, [&api, in](Then& then) {
      then = [&api, in] { api.answer(*in, json_response("{}")); };
      return api.retire_instance(in->request.body);
    });
  };
  static constexpr auto server_info = [](Api& api, const In& in) {
    api.answer(*in, json_response(JsonText().object("options", api.options_.server_info).take()));
  };
  static constexpr Row kRows[] = {
      {{"/", "GET", true, false}, page},
      {{"/health", "GET", true, false}, health},
      {{"/ping", "GET POST", true, false}, health},
      {{"/ready", "GET", true, false}, ready},
      {{"/health/ready", "GET", true, false}, ready},
      {{"/version", "GET", false, false}, version},
      {{"/metrics", "GET", false, false}, metrics},
      {{"/stats", "GET", false, false}, stats},
      {{"/v1/models", "GET", false, false}, models},
      {{kModelPrefix, "GET", false, false}, model_by_id},
      {{"/v1/completions", "POST", false, false}, [](Api& api, const In& in) { api.generate(in, false); }},
      {{"/v1/chat/completions", "POST", false, false}, [](Api& api, const In& in) { api.generate(in, true); }},
      {{"/tokenize", "POST", false, false}, [](Api& api, const In& in) { api.convert(in, tokenize); }},
      {{"/detokenize", "POST", false, false}, [](Api& api, const In& in) { api.convert(in, detokenize); }},
      {{"/reset_prefix_cache", "POST", false, true}, reset_prefix_cache},
      {{"/retire_instance", "POST", false, true}, retire_instance},
      {{"/server_info", "GET", false, true}, server_info},
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
      metrics_(options.metrics_prefix, options.name, options.max_model_len),
      random_(options.seed),
      id_random_(random_word()),
      created_unix_s_(std::time(nullptr)) {
  if (options_.names.empty()) options_.names = {options_.name};
  options_.tokenizer = tokenizer;
  options_.chat_template = chat_template;
  if (tokenizer != nullptr) {
    if (options_.vocab_size == 0 || options_.vocab_size > tokenizer->vocab_size())
      options_.vocab_size = tokenizer->vocab_size();
    options_.max_prompt_bytes = longest_prompt_bytes(*tokenizer, options_.max_model_len);
  }
  options_.salt_key = {random_word(), random_word()};
  // Each key has its own store, so no client can displace another key's conversations.
  const size_t owners = std::max<size_t>(1, options.api_keys.size());
  for (size_t i = 0; i < owners; ++i)
    sessions_.push_back(std::make_shared<Sessions>(std::max(1, options.max_sessions / static_cast<int>(owners)),
                                                   options.session_bytes / owners));
}

Api::~Api() = default;

// ---- Every request.

const Api::Row* Api::find_row(const HttpRequest& request) const {
  const Row* row = nullptr;
  for (const Row& candidate : table()) {
    bool hit = candidate.path == kModelPrefix ? request.path.starts_with(kModelPrefix) : request.path == candidate.path;
    if (hit) row = &candidate;
  }
  if (row != nullptr && row->dev && !(options_.dev_endpoints && request.from_loopback)) row = nullptr;
  return row;
}

std::optional<HttpResponse> Api::on_header(const HttpRequest& request) {
  const Row* row = find_row(request);
  auto refusal = turn_away(request, row);
  if (refusal) finish(request, row, *refusal, "");
  return refusal;
}

void Api::handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  const Row* row = find_row(request);
  row->handle(*this, std::make_shared<Incoming>(Incoming{std::move(request), std::move(exchange), row, clock_.now()}));
}

std::optional<HttpResponse> Api::turn_away(const HttpRequest& request, const Row* row) {
  // A browser asks without a key whether a page may send a request with one (preflight).
  const bool asks = request.method == "OPTIONS" && !request.header("access-control-request-method").empty();
  if (asks && allows_origin(request, options_.allowed_origins) &&
      !object_to(request, options_.allowed_hosts, options_.allowed_origins))
    return preflight(request);
  const bool guarded = !options_.api_keys.empty() && (row == nullptr || !row->open);
  if (guarded && key_owner(options_.api_keys, request) < 0) {
    metrics_.rejected(RejectReason::unauthorized);
    HttpResponse response = error_response(
        {.status = 401,
         .message = "expected the header Authorization: Bearer KEY with a key of this server",
         .code = "invalid_api_key"});
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
    return response;
  }
  if (const auto objection = object_to(request, options_.allowed_hosts, options_.allowed_origins))
    return error_response({.status = objection->first, .message = objection->second});
  if (row == nullptr) return error_response({.status = 404, .message = "this path does not exist"});
  std::string_view methods = row->methods;
  std::string_view method = request.method == "HEAD" ? "GET" : std::string_view(request.method);
  if ((method != "GET" && method != "POST") || methods.find(method) == methods.npos) {
    HttpResponse response = error_response(
        {.status = 405, .message = std::string("this path accepts ") + row->methods});
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

HttpHeaders Api::cross_origin(const HttpRequest& request) const {
  if (!allows_origin(request, options_.allowed_origins)) return {};
  return {{"Access-Control-Allow-Origin", std::string(request.header("origin"))},
          {"Access-Control-Expose-Headers", "X-Request-Id, Retry-After"},
          {"Vary", "Origin"}};
}

// Allows what the routes accept, and every header that the page asks for. No route obeys them without a key.
HttpResponse Api::preflight(const HttpRequest& request) const {
  HttpResponse response{.content_type = "text/plain"};
  response.headers = {{"Access-Control-Allow-Methods", "GET, POST"}, {"Access-Control-Max-Age", "600"}};
  if (const std::string_view wanted = request.header("access-control-request-headers"); !wanted.empty())
    response.headers.emplace_back("Access-Control-Allow-Headers", std::string(wanted));
  return response;
}

HttpResponse Api::error_response(const ApiError& error) {
  HttpResponse response = json_response(error_body(error), error.status);
  if (error.status == 503 || error.status == 429)
    response.headers.emplace_back("Retry-After", std::to_string(std::max(1L, std::lround(std::ceil(error.retry_s)))));
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
  for (auto& header : cross_origin(request)) response.headers.push_back(std::move(header));
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

void Api::on_body(const std::shared_ptr<Incoming>& in, std::function<std::optional<ApiError>(Then& then)> work) {
  auto whole_work = [this, in, work = std::move(work)]() -> Then {
    Then then;
    auto error = work(then);
    if (error) return [this, in, error = std::move(*error)] { fail(*in, error); };
    return then;
  };
  // A session adds its history to a small body. Its field name may be spelled with \u escapes.
  const std::string& body = in->request.body;
  const bool is_short = body.size() <= kInlineBodyBytes && body.find("session_id") == body.npos &&
                        body.find("\\u") == body.npos;
  if (is_short) return whole_work()();
  body_threads_.run(in->request.body.size(),
                    [post = post_, whole_work = std::move(whole_work)] { post(whole_work()); });
}

void Api::tick() {
  double now = clock_.now();
  std::vector<std::shared_ptr<Generation>> all;
  for (auto& [key, generation] : live_) all.push_back(generation);
  for (auto& generation : all) generation->tick(now);
}

void Api::log_line(LogLevel level, const std::string& line) {
  if (level < options_.log_level) return;
  const std::string text = log_stamp(level) + line;
  options_.log ? options_.log(text) : say(text);
}

// ---- Keys and bodies.

int key_owner(const std::vector<std::string>& keys, const HttpRequest& request) {
  constexpr std::string_view kScheme = "bearer ";
  std::string_view given = request.header("authorization");
  if (lower(given.substr(0, kScheme.size())) != kScheme) return -1;
  given.remove_prefix(kScheme.size());
  int owner = -1;
  for (size_t i = 0; i < keys.size(); ++i)
    if (equal_keys(given, keys[i])) owner = static_cast<int>(i);
  return owner;
}

bool is_api_key(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 127; });
}

Result<std::vector<std::string>> read_api_keys(const std::string& path) {
  struct stat about {};
  if (stat(path.c_str(), &about) == 0 && (about.st_mode & (S_IRWXO | S_IWGRP)) != 0)
    return invalid(path + ": other users may read or change this file; expected mode 0600 or 0640");
  auto text = read_small_file(path, kMaxKeyFileBytes);
  if (!text) return text.error();
  std::vector<std::string> keys;
  std::istringstream lines(text.value());
  for (std::string line; std::getline(lines, line);) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (line.empty() || line[0] == '#') continue;
    if (!is_api_key(line)) return invalid(path + ": a key must be printable ASCII without blanks");
    keys.push_back(std::move(line));
  }
  if (keys.empty()) return invalid(path + ": expected one key per line, found none");
  return keys;
}

BodyThreads::~BodyThreads() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void BodyThreads::run(size_t body_bytes, Work work) {
  std::lock_guard lock(mutex_);
  (body_bytes <= kSmallBodyBytes ? small_ : large_).push_back(std::move(work));
  if (threads_.empty()) {
    const unsigned n = std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u);
    for (unsigned i = 0; i <= n; ++i) threads_.emplace_back([this, i] { loop(i == 0); });
  }
  changed_.notify_all();
}

void BodyThreads::loop(bool small_only) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopped_ || !small_.empty() || (!small_only && !large_.empty()); });
    if (stopped_) return;
    std::deque<Work>& works = small_only || large_.empty() ? small_ : large_;
    Work work = std::move(works.front());
    works.pop_front();
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
  }
}

// ---- The routes.

// vocab_size is an extension of this server, for clients that generate random prompts.
std::string Api::model_card(const std::string& name) const {
  return JsonText()
      .object("id", name, "object", "model", "created", created_unix_s_, "owned_by", "xpyd", "root",
              options_.model_root, "parent", nullptr, "max_model_len", model_.max_model_len, "vocab_size",
              model_.vocab_size, "permission", std::vector<int>())
      .take();
}

namespace {

// Reads x-slo-ttft-ms and x-slo-tbt-ms: milliseconds above 0.
std::optional<ApiError> read_objectives(const HttpRequest& request, GenerationCall& call) {
  const auto read = [&](const char* name, double Request::*seconds) -> std::optional<ApiError> {
    const std::string text(request.header(name));
    if (text.empty()) return {};
    char* end = nullptr;
    const double ms = std::strtod(text.c_str(), &end);
    if (*end != 0 || !(ms > 0) || ms > 1e9)
      return ApiError{.message = std::string(name) + ": expected milliseconds above 0", .param = name};
    for (Request& prompt : call.prompts) prompt.*seconds = ms / 1e3;
    return {};
  };
  auto error = read("x-slo-ttft-ms", &Request::slo_ttft_s);
  return error ? error : read("x-slo-tbt-ms", &Request::slo_tbt_s);
}

}  // namespace

void Api::generate(const std::shared_ptr<Incoming>& in, bool chat) {
  on_body(in, [this, in, chat](Then& then) {
    auto call = std::make_shared<GenerationCall>();
    const int owner = std::max(0, key_owner(options_.api_keys, in->request));
    auto error = parse_generation(in->request.body, chat, model_, *call, sessions_[static_cast<size_t>(owner)].get());
    if (!error) error = read_objectives(in->request, *call);
    in->request.body = std::string();
    then = [this, in, chat, call] {
      const std::string random = hex(id_random_.next()) + hex(id_random_.next() >> 32, 8);
      const std::string id = (chat ? "chatcmpl-" : "cmpl-") + random;
      auto generation = std::make_shared<Generation>(*this, std::move(*call), in->exchange, id, client_id(in->request),
                                                     cross_origin(in->request), in->arrival_s);
      live_[generation.get()] = generation;
      generation->start();
    };
    return error;
  });
}

void Api::convert(const std::shared_ptr<Incoming>& in, decltype(tokenize)& text_or_ids) {
  on_body(in, [this, in, &text_or_ids](Then& then) {
    auto body = std::make_shared<std::string>();
    then = [this, in, body] { answer(*in, json_response(std::move(*body))); };
    return text_or_ids(in->request.body, model_, *body);
  });
}

std::optional<ApiError> Api::retire_instance(std::string_view text) try {
  const nlohmann::json body = need(parse_json(text, "request body"));
  const std::string name = need(get_string(body, "name"));
  const std::string role = body.contains("role") ? need(get_string(body, "role")) : "";
  if (body.contains("role") && role != "prefill" && role != "decode" && role != "colocated")
    throw invalid("role: expected prefill, decode or colocated, got " + role);
  need(options_.retire_instance(name, role));
  return {};
} catch (const Error& error) {
  return ApiError{.status = error.code == ErrorCode::not_found ? 404 : 400, .message = error.message};
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
                   ": other machines can reach this address: expected --api-key-file, or --insecure if everybody may "
                   "use the server");
  auto server = std::unique_ptr<HttpServer>(new HttpServer());
  server->listener_ = std::move(listener).value();
  server->api_ = std::make_unique<Api>(options, service, tokenizer, chat_template, clock, server->listener_->post());
  return server;
}

}  // namespace xpyd::server
