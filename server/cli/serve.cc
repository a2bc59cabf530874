// xpyd serve. Read server/cli/tour.cc first. One request takes this path, one call per arrow:
//
//   HTTP bytes        -> HttpRequest  server/http/http.cc       one I/O thread, every connection
//   HttpRequest       -> Request      server/openai/api_parse.cc  JSON fields checked, text -> tokens
//   Request           -> Placement    disagg/conductor/conductor.cc  submit: a snapshot, a placement policy
//   Placement         -> P (or C)     disagg/instance/instance.cc   StartRequest; ReserveKv to D
//   waiting sequences -> BatchPlan    batch/policies/policy.cc      what runs in the next step
//   BatchPlan         -> logits       batch/engine/engine.cc      memory from allocator/, forward
//                                                          of model/, attention/ over KvViews
//   KV of the prompt  -> D            disagg/handover/sender.cc, transport/, handover/receiver.cc
//   logits            -> TokenEvent   model/sampler.cc, batch/output_text.cc
//   TokenEvent        -> SSE          server/openai/generation.cc
#include <cstdio>
#include <filesystem>

#include "base/log.h"
#include "base/numbers.h"
#include "base/os.h"
#include "model/folder.h"
#include "model/generation_config.h"
#include "server/build.h"
#include "server/cli/commands.h"
#include "server/openai/api.h"
#include "server/workers/signals.h"

namespace xpyd::server {
namespace {
ServerOptions access_options(const Options& options);
void complete(ServerOptions& http, const Options& options, Build& build);
}  // namespace

int serve_main(const Options& options) {
  SignalThread signals;
  ServerOptions http = access_options(options);

  // Request -> TokenEvent: tokenizer, model, instances and conductor. Nothing runs yet.
  const std::unique_ptr<Build> built = need(make_build(options));
  Build& build = *built;

  const struct Finish {
    SignalThread& signals;
    ~Finish() { signals.finish(); }  // before the objects that its handlers use are destroyed
  } finish{signals};

  // Of several conductors, one serves; the others wait here.
  if (build.processes) signals.handle([&](int) { build.runtime->drain(); });
  if (const Status elected = build.runtime->stand_by(); !elected) {
    signals.finish();
    if (signals.first()) return 128 + signals.first();
    need(elected);
  }

  // HTTP bytes -> Request, TokenEvent -> SSE. The port is bound; no request is answered yet.
  raise_descriptor_limit();
  complete(http, options, build);
  const std::unique_ptr<HttpServer> listening = need(
      HttpServer::listen(http, *build.runtime, build.tokenizer.get(), build.chat_template.get(), build.clock));
  HttpServer& server = *listening;

  signals.handle([&](int count) {
    log_line(LogLevel::info, "xpyd serve: %s", count > 1 ? "stopping" : "draining; a second signal stops at once");
    build.runtime->drain();
    if (count > 1)
      server.stop();
    else
      server.begin_drain();
  });

  // Each instance runs its loop on a thread, or in a process, of its own. This thread does I/O.
  const Status started = build.runtime->start();
  if (started) {
    say("xpyd serve: " + http.name + " as " + options.text("topology") + " on http://" + http.host + ":" +
        std::to_string(server.port()));
    server.run();
  }
  signals.finish();
  build.runtime->stop();
  if (!started && signals.first()) return 128 + signals.first();
  need(started);
  if (const uint64_t hash = build.runtime->stats().conductor.logits_hash; hash != 0)  // 0: no request has ended
    say("logits hash " + hex(hash));
  return 0;
}

namespace {

// Readers of /stats must not learn file names, user names and addresses. Of such options it shows only that they are
// given.
std::string switches_json(const Options& options, const Build& build) {
  auto shown = options.shown_values();
  if (!options.given("transport")) shown["transport"] = build.options.transport->name;  // processes: another default
  JsonText out;
  out.open('[');
  for (const OptionRow& row : options.rows()) {
    const std::string_view takes = row.choices;
    const bool listed = takes.starts_with("xPyD") || (takes.find('|') != takes.npos && !takes.starts_with("FILE"));
    const bool given = options.given(row.name);
    const bool hidden = row.kind == OptionKind::text && given && !listed;
    out.open('[').value(row.name).value(hidden ? "given" : shown.at(row.name)).value(given).close(']');
  }
  return out.close(']').take();
}

// Reads what needs no model, before the build opens or overwrites a file. Throws an Error if an option is wrong.
ServerOptions access_options(const Options& options) {
  ServerOptions http;
  options.fill<HttpListenOptions>(http);
  options.fill<ServedModel>(http);
  options.fill(http);
  if (!http.api_key_file.empty()) http.api_key = need(read_api_key(http.api_key_file), "--api-key-file: ");
  return http;
}

void complete(ServerOptions& http, const Options& options, Build& build) {
  if (http.name.empty()) http.name = build.config.name;
  http.model_root = is_embedded(build.model_dir) ? build.model_dir
                                                 : std::filesystem::absolute(build.model_dir).string();
  http.other_names = {build.model_dir, http.model_root};
  http.max_model_len = build.options.max_model_len;
  http.vocab_size = build.config.vocab;
  http.kv_token_bytes = build.options.kv.shape.token_bytes();
  http.seed = build.options.seed;
  http.sampling = need(load_generation_config(build.model_dir));
  http.switches = switches_json(options, build);
  http.reset_prefix_cache = [&build] { build.runtime->clear_prefix_caches(); };
  http.retire_instance = [&build](const std::string& name, const std::string& role) {
    return build.runtime->retire(name, role.empty() ? std::nullopt : std::optional<Role>(role_of(role)));
  };
}

}  // namespace
}  // namespace xpyd::server
