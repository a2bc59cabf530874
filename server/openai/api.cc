#include "server/openai/api.h"

#include <sys/stat.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/numbers.h"
#include "disagg/net/hello.h"

extern "C" const char xpyd_page_begin[], xpyd_page_end[];  // page.cc

namespace xpyd::server {
namespace {

// Bodies up to this size are parsed and tokenized on the I/O thread: about a millisecond. Longer ones go to other
// threads.
constexpr size_t kInlineBodyBytes = 16u << 10;
constexpr size_t kMaxKeyFileBytes = 4u << 10;

// Compares digests, so that the time says nothing about the keys or their lengths.
bool equal_keys(std::string_view a, std::string_view b) {
  return equal_in_constant_time(hmac_sha256("", a), hmac_sha256("", b));
}

HttpResponse json_response(std::string body, int status = 200) { return {.status = status, .body = std::move(body)}; }

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
  // Ready: some instance can prefill and some instance can decode.
  static constexpr auto health = [](Api& api, const In& in) {
    const std::string why = api.trouble();
    JsonText out;
    out.open('{').add("status", why.empty() ? "ready" : api.draining_ ? "draining" : "unhealthy");
    if (!why.empty()) out.add("reason", why);
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
  static constexpr auto metrics = [](Api& api, const In& in) {
    api.answer(*in, {.content_type = "text/plain; version=0.0.4; charset=utf-8",
                     .body = api.metrics_.render(api.service_.stats(), api.sessions_->stats())});
  };
  static constexpr auto stats = [](Api& api, const In& in) {
    api.answer(*in,
               {.headers = {{"Cache-Control", "no-store"}},
                .body = stats_body(api.model_, api.service_.stats(), api.service_.picture(), api.options_.switches)});
  };
  static constexpr auto models = [](Api& api, const In& in) {
    JsonText out;
    out.open('{').add("object", "list").key("data").open('[').raw(api.model_card());
    api.answer(*in, json_response(out.close(']').close('}').take()));
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
  static constexpr Row kRows[] = {
      {{"/", "GET", true, false}, page},
      {{"/health", "GET", true, false}, health},
      {{"/metrics", "GET", false, false}, metrics},
      {{"/stats", "GET", false, false}, stats},
      {{"/v1/models", "GET", false, false}, models},
      {{"/v1/completions", "POST", false, false}, [](Api& api, const In& in) { api.generate(in, false); }},
      {{"/v1/chat/completions", "POST", false, false}, [](Api& api, const In& in) { api.generate(in, true); }},
      {{"/tokenize", "POST", false, false}, [](Api& api, const In& in) { api.convert(in, tokenize); }},
      {{"/detokenize", "POST", false, false}, [](Api& api, const In& in) { api.convert(in, detokenize); }},
      {{"/reset_prefix_cache", "POST", false, true}, reset_prefix_cache},
      {{"/retire_instance", "POST", false, true}, retire_instance},
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
      sessions_(std::make_shared<Sessions>(options.max_sessions, options.session_bytes)),
      metrics_(options.name, options.kv_token_bytes),
      random_(options.seed),
      id_random_(random_word()),
      created_unix_s_(std::time(nullptr)),
      body_threads_(
          std::make_unique<boost::asio::thread_pool>(std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u))) {
  options_.tokenizer = tokenizer;
  options_.chat_template = chat_template;
  if (tokenizer != nullptr) {
    if (options_.vocab_size == 0 || options_.vocab_size > tokenizer->vocab_size())
      options_.vocab_size = tokenizer->vocab_size();
    options_.max_prompt_bytes = longest_prompt_bytes(*tokenizer, options_.max_model_len);
  }
  options_.salt_key = {random_word(), random_word()};
}

Api::~Api() = default;

// ---- Every request.

const Api::Row* Api::find_row(const HttpRequest& request) const {
  for (const Row& row : table())
    if (request.path == row.path && (request.from_loopback || !row.local)) return &row;
  return nullptr;
}

std::optional<HttpResponse> Api::on_header(const HttpRequest& request) {
  const Row* row = find_row(request);
  auto refusal = turn_away(request, row);
  if (refusal) finish(row, *refusal, "");
  return refusal;
}

void Api::handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  const Row* row = find_row(request);
  row->handle(*this, std::make_shared<Incoming>(Incoming{std::move(request), std::move(exchange), row, clock_.now()}));
}

std::optional<HttpResponse> Api::turn_away(const HttpRequest& request, const Row* row) {
  const bool guarded = !options_.api_key.empty() && (row == nullptr || !row->open);
  if (guarded && !has_key(options_.api_key, request)) {
    HttpResponse response = error_response(
        {.status = 401,
         .message = "expected the header Authorization: Bearer KEY with the key of this server",
         .code = "invalid_api_key"});
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
    return response;
  }
  if (const auto objection = object_to(request, options_.allowed_hosts))
    return error_response({.status = objection->first, .message = objection->second});
  if (row == nullptr) return error_response({.status = 404, .message = "this path does not exist"});
  if (row->method != (request.method == "HEAD" ? "GET" : request.method)) {
    HttpResponse response = error_response({.status = 405, .message = std::string("this path accepts ") + row->method});
    response.headers.emplace_back("Allow", row->method == std::string_view("GET") ? "GET, HEAD" : "POST");
    return response;
  }
  if (row->method == std::string_view("GET") || !draining_) return {};
  HttpResponse response = error_response({.status = 503, .message = "the server is shutting down"});
  response.close = true;
  return response;
}

HttpResponse Api::error_response(const ApiError& error) {
  HttpResponse response = json_response(error_body(error), error.status);
  if (error.status == 503 || error.status == 429) response.headers.emplace_back("Retry-After", "1");
  if (error.status >= 500 && error.status != 503) response.headers.emplace_back("X-Should-Retry", "false");
  return response;
}

HttpResponse Api::refuse(int status, const std::string& why) {
  return error_response({.status = status, .message = why});
}

void Api::answer(const Incoming& in, HttpResponse response, const std::string& why) {
  finish(in.row, response, why);
  in.exchange->respond(std::move(response));
}

void Api::finish(const Row* row, HttpResponse& response, const std::string& why) {
  response.headers.emplace_back("X-Content-Type-Options", "nosniff");
  if (response.status >= 400 || options_.log_level == LogLevel::debug)
    log_line(response.status >= 500   ? LogLevel::error
             : response.status >= 400 ? LogLevel::warning
                                      : LogLevel::debug,
             std::string(response.status >= 400 ? "refused" : "answered") + " route=" +
                 (row == nullptr ? "none" : row->path) + " status=" + std::to_string(response.status) + why);
}

void Api::fail(const Incoming& in, const ApiError& error) {
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
  // A session adds its history to a small body.
  const std::string& body = in->request.body;
  if (body.size() <= kInlineBodyBytes && body.find("session_id") == body.npos) return whole_work()();
  boost::asio::post(*body_threads_, [post = post_, whole_work = std::move(whole_work)] { post(whole_work()); });
}

void Api::log_line(LogLevel level, const std::string& line) {
  if (level < options_.log_level) return;
  const std::string text = log_stamp(level) + line;
  options_.log ? options_.log(text) : say(text);
}

// ---- The key.

bool has_key(const std::string& key, const HttpRequest& request) {
  constexpr std::string_view kScheme = "bearer ";
  std::string_view given = request.header("authorization");
  if (lower(given.substr(0, kScheme.size())) != kScheme) return false;
  return equal_keys(given.substr(kScheme.size()), key);
}

Result<std::string> read_api_key(const std::string& path) {
  struct stat about {};
  if (stat(path.c_str(), &about) == 0 && (about.st_mode & (S_IRWXO | S_IWGRP)) != 0)
    return invalid(path + ": other users may read or change this file; expected mode 0600 or 0640");
  auto key = read_small_file(path, kMaxKeyFileBytes);
  if (!key) return key.error();
  key.value().erase(key.value().find_last_not_of(" \t\r\n") + 1);
  if (key.value().empty() || !std::ranges::all_of(key.value(), [](char c) { return c > ' ' && c < 127; }))
    return invalid(path + ": expected one key, printable ASCII without blanks");
  return key;
}

// ---- The routes.

// vocab_size is an extension of this server, for clients that generate random prompts.
std::string Api::model_card() const {
  return JsonText()
      .object("id", model_.name, "object", "model", "created", created_unix_s_, "owned_by", "xpyd", "root",
              options_.model_root, "parent", nullptr, "max_model_len", model_.max_model_len, "vocab_size",
              model_.vocab_size, "permission", std::vector<int>())
      .take();
}

void Api::generate(const std::shared_ptr<Incoming>& in, bool chat) {
  on_body(in, [this, in, chat](Then& then) {
    auto call = std::make_shared<GenerationCall>();
    auto error = parse_generation(in->request.body, chat, model_, *call, sessions_.get());
    in->request.body = std::string();
    then = [this, in, chat, call] {
      const std::string random = hex(id_random_.next()) + hex(id_random_.next() >> 32, 8);
      const std::string id = (chat ? "chatcmpl-" : "cmpl-") + random;
      auto generation = std::make_shared<Generation>(*this, std::move(*call), in->exchange, id, in->arrival_s);
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
  if (options.max_model_len < 2)
    return invalid("max_model_len " + std::to_string(options.max_model_len) + ": expected at least 2 tokens");
  auto listener = HttpListener::open(options);
  if (!listener.ok()) return listener.error();
  if (options.api_key.empty() && !listener.value()->is_loopback())
    return invalid("--host " + options.host +
                   ": other machines can reach this address, so the server needs --api-key-file");
  auto server = std::unique_ptr<HttpServer>(new HttpServer());
  server->listener_ = std::move(listener).value();
  server->api_ = std::make_unique<Api>(options, service, tokenizer, chat_template, clock, server->listener_->post());
  return server;
}

}  // namespace xpyd::server
