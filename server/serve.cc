// xpyd serve: the page to read first. One request travels like this, one call per arrow:
//
//   HTTP bytes        -> HttpRequest  server/http.cc       one I/O thread, every connection
//   HttpRequest       -> Request      server/api_parse.cc  JSON fields checked, text -> tokens
//   Request           -> Placement    disagg/conductor.cc  submit: a snapshot, a placement policy
//   Placement         -> P (or C)     disagg/instance.cc   StartRequest; ReserveKv to D
//   waiting sequences -> BatchPlan    batch/policy.cc      what runs in the next step
//   BatchPlan         -> logits       batch/engine.cc      memory from allocator/, forward of model/,
//                                                          attention/ over KvViews
//   KV of the prompt  -> D            disagg/kv_sender.cc, transport/, kv_receiver.cc
//   logits            -> TokenEvent   model/sampler.cc, batch/output_text.cc
//   TokenEvent        -> SSE          server/generation.cc, server/api_format.cc
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <thread>

#include "base/version.h"
#include "model/folder.h"
#include "server/commands.h"
#include "server/http_server.h"
#include "server/stack.h"

namespace xpyd {
namespace {

// SIGTERM and SIGINT: the first drains, the second stops at once. Blocked in every thread and taken
// here, so that what they cause runs as ordinary code.
class SignalThread {
 public:
  // To be constructed before any other thread.
  SignalThread() {
    sigemptyset(&set_);
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set_, signal);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);
  }
  void start(HttpServer& server, Runtime& cluster) {
    thread_ = std::thread([this, &server, &cluster] {
      for (int received, count = 0; sigwait(&set_, &received) == 0 && received != SIGUSR1;) {
        if (++count == 1) {
          std::fprintf(stderr, "xpyd serve: draining; a second signal stops at once\n");
          cluster.drain();
          server.begin_drain();
        } else {
          server.stop();
        }
      }
    });
  }
  ~SignalThread() {
    if (!thread_.joinable()) return;
    pthread_kill(thread_.native_handle(), SIGUSR1);  // ends the loop above
    thread_.join();
  }

 private:
  sigset_t set_;
  std::thread thread_;
};

int fail(const Error& error) {
  std::fprintf(stderr, "xpyd serve: %s\n", error.message.c_str());
  return error.code == ErrorCode::invalid_argument ? 2 : 1;
}

}  // namespace

int serve_main(const Options& options) {
  SignalThread signals;
  Result<std::unique_ptr<Stack>> built =
      build_stack(options);  // model, tokenizer, KV memory, instances
  if (!built) return fail(built.error());
  Stack& stack = *built.value();

  ServerOptions http;
  http.host = options.text("host");
  http.port = int(options.integer("port"));
  http.max_connections = int(options.integer("max-connections"));
  http.request_timeout_s = options.number("request-timeout");
  http.model_name = options.text("served-model-name");
  if (http.model_name.empty()) http.model_name = stack.config.name;
  http.model_root = stack.model_dir;
  if (!is_embedded(stack.model_dir))
    http.model_root = std::filesystem::absolute(stack.model_dir).string();
  http.version = version();
  http.max_model_len = stack.max_model_len;
  http.vocab_size = stack.config.vocab;
  http.api_key = options.text("api-key");
  http.max_sessions = int(options.integer("max-sessions"));
  http.session_bytes = size_t(options.integer("session-bytes"));
  http.metrics_prefix = options.text("metrics-prefix");
  http.seed = uint64_t(options.integer("seed"));
  http.dev_endpoints = options.flag("dev-endpoints");
  http.server_info = options.table();
  http.reset_prefix_cache = [&stack] {
    stack.runtime->clear_prefix_caches();
  };
  http.retire_instance = [&stack](const std::string& name, const std::string& role) {
    return stack.runtime->retire(name, role.empty() ? std::nullopt
                                                    : std::optional<Role>(role_of(role)));
  };
  Result<std::unique_ptr<HttpServer>> listening = HttpServer::listen(
      http, *stack.runtime, stack.tokenizer.get(), stack.chat_template.get(), stack.clock);
  if (!listening) return fail(listening.error());
  HttpServer& server = *listening.value();

  if (Status started = stack.runtime->start(); !started) return fail(started.error());
  signals.start(server, *stack.runtime);
  std::fprintf(stderr, "xpyd serve: %s as %s on http://%s:%d\n", http.model_name.c_str(),
               options.text("topology").c_str(), http.host.c_str(), server.port());
  server.run();

  stack.runtime->stop();
  if (stack.backend)
    std::fputs(stack.backend->describe().c_str(),
               stderr);  // graphs and kernels chosen since it started
  std::fprintf(stderr, "logits hash %016llx\n",
               static_cast<unsigned long long>(stack.runtime->logits_hash()));
  return 0;
}

}  // namespace xpyd
