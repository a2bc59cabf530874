#include "server/http_server.h"

namespace xpyd {

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
