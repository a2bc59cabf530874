// The frontend as a whole: listener and routes in front of a Service.
//
// Thread safety: run() on one thread; the others from any (not from a signal handler).
#pragma once

#include <memory>

#include "base/clock.h"
#include "base/status.h"
#include "disagg/service.h"
#include "server/api.h"

namespace xpyd {

class HttpServer {
 public:
  // Binds the port (an address in use is an error that names it) and checks the options. Without a
  // tokenizer only prompts of token ids are served, without a template no chat. Everything passed
  // by reference or pointer must live until the service has ended its last request; events that
  // come after the server has gone are dropped.
  static Result<std::unique_ptr<HttpServer>> listen(const ServerOptions& options, Service& service,
                                                    const Tokenizer* tokenizer, const ChatTemplate* chat_template,
                                                    Clock& clock);
  void run();  // until stop(), or the end of a drain

  // 503 for new requests; run() returns when what runs is answered.
  void begin_drain();
  void stop();  // drops every connection; run() returns
  int port() const { return listener_->port(); }
  bool is_loopback() const { return listener_->is_loopback(); }

 private:
  HttpServer() = default;
  std::unique_ptr<Api> api_;
  std::unique_ptr<HttpListener> listener_;  // goes first: its connections call back into the api
};

}  // namespace xpyd
