// The short subcommands (generate, worker, peak, export), and the result files of all.
#include "server/cli/commands.h"

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/files.h"
#include "base/json/json.h"
#include "base/peak/peak.h"
#include "base/version.h"
#include "model/folder.h"
#include "server/build.h"
#include "server/workers/local_workers.h"
#include "server/workers/rank_processes.h"
#include "server/workers/signals.h"

namespace xpyd::server {
namespace {

Status of_option(const Status& status, ErrorCode code) {
  return status ? status : Error{code, "--json: " + status.error().message};
}

// Prints a device's own figures.
nlohmann::json peak_of_device(const DeviceRow& device) {
  const DevicePeak peak = need(device.peak());
  std::printf("%s\n", peak.device.c_str());
  nlohmann::json out = {{"machine", peak.device}, {"figures", nlohmann::json::array()}};
  for (const PeakFigure& figure : peak.figures) {
    std::printf("%-40s %10.2f %s\n", figure.name, figure.value, figure.unit);
    out["figures"].push_back({{"name", figure.name}, {"value", figure.value}, {"unit", figure.unit}});
  }
  return out;
}

nlohmann::json peak_of_host(int threads) {
  std::vector<int> cpus = usable_cpus();
  if (threads == 0) threads = cpus.empty() ? 1 : int(cpus.size());
  if (threads > int(cpus.size()) && !cpus.empty())
    throw invalid("--threads: this machine has " + std::to_string(cpus.size()) +
                  " usable cores; expected at most as many");
  if (!cpus.empty()) cpus.resize(size_t(threads));
  ThreadTeam team(threads, cpus);
  const Peak peak = measure_peak(team);
  std::printf("%s", to_text(peak).c_str());
  return need(parse_json(to_json(peak), "peak"));
}

// Prints text as it becomes final and records the times of tokens.
class Printer final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    std::fputs(event.text.c_str(), stdout);
    std::fflush(stdout);
    std::lock_guard lock(mutex_);
    if (event.token >= 0) times.push_back(event.time_s);
    if (event.finish != FinishReason::none) {
      end = std::move(event);
      ended_ = true;
      done_.notify_all();
    }
  }
  void wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return ended_; });
  }
  std::vector<double> times;  // of each token
  TokenEvent end;

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool ended_ = false;
};

}  // namespace

nlohmann::json run_header(const Options& options) {
  nlohmann::json header = provenance();
  header["options"] = options.shown_values();
  return header;
}

Status check_result_file(const Options& options) {
  const std::string& path = options.text("json");
  return path.empty() ? ok() : of_option(check_replaceable(path), ErrorCode::invalid_argument);
}

Status write_result_file(const Options& options, nlohmann::json result) {
  const std::string& path = options.text("json");
  if (path.empty()) return ok();
  result["run"] = run_header(options);
  return of_option(replace_file(path, json_text(result, 2) + "\n"), ErrorCode::io);
}

// xpyd export DIR writes the demo model inside this binary as a folder, from which clients can load a tokenizer.
int export_main(const Options& options) try {
  if (options.positional().empty()) throw invalid("expected DIR, a new or empty folder, as an argument");
  need(export_demo(options.positional()[0]));
  return 0;
} catch (const Error& error) {
  return fail(": export", error);
}

// xpyd peak measures now what this machine can do. Other runs read the figures from the cache that it leaves.
int peak_main(const Options& options) try {
  need(check_result_file(options));
  const DeviceRow& device = *find_device(options.text("device"));
  need(
      write_result_file(options, device.peak ? peak_of_device(device) : peak_of_host(int(options.integer("threads")))));
  return 0;
} catch (const Error& error) {
  return fail(": peak", error);
}

// xpyd worker runs one instance in a process of its own. It joins a conductor (`xpyd serve --processes`), serves, and
// joins again after the conductor was restarted. The first SIGTERM drains it, the second ends it.
int worker_main(const Options& options) {
  SignalThread signals;
  const std::unique_ptr<Build> prepared = need(prepare_build(options));
  Build& build = *prepared;
  WorkerOptions worker_options{.fingerprint = fingerprint(build)};
  options.fill(worker_options);
  ProcessOptions cluster;
  options.fill(cluster);
  if (!cluster.key_file.empty()) worker_options.key = cluster.read_key();
  const bool is_stage = options.integer("rank") >= 0;
  struct Found {
    std::mutex mutex;
    std::string value;
  } found;  // set by the registry, below
  const std::unique_ptr<Registry> registry = cluster.open_registry(build.clock);
  if (registry) {
    const std::string name = is_stage ? rank_group_name(options) : kConductorName;
    registry->watch(name, [&found](const std::string& value) {
      std::lock_guard lock(found.mutex);
      found.value = value;
    });
    worker_options.find_conductor = [&found] {
      std::lock_guard lock(found.mutex);
      return NamedConductor::of(found.value);
    };
  }
  build.options.ranks = head_options(options, build, worker_options.key, registry.get());
  if (!is_stage && !build.options.ranks) need(open_backend(build));
  worker_options.cluster = build.options;
  if (is_stage) {
    need(serve_stage(options, build, worker_options, signals));
    return 0;
  }
  Worker worker(std::move(worker_options), build.clock);
  signals.handle([&worker](int count) {
    log_line(LogLevel::info, "xpyd worker: %s", count > 1 ? "stopping" : "leaving; a second signal stops it at once");
    if (count > 1)
      worker.stop();
    else
      worker.leave();
  });
  const Status served = worker.run();
  signals.finish();
  need(served);
  return 0;
}

// xpyd generate sends one prompt through the whole path, without HTTP. Only the continuation goes to stdout.
int generate_main(const Options& options) {
  SignalThread signals;
  const std::unique_ptr<Build> built = need(make_build(options));
  Build& build = *built;
  if (!build.tokenizer) throw invalid("the model folder has no tokenizer.json");

  auto request = std::make_shared<Request>();
  request->id = 1;
  const std::string& prompt = options.text("prompt");
  if (options.flag("chat")) {
    if (!build.chat_template) throw invalid("--chat: the model has no chat template; --chat-template gives one");
    request->prompt = build.chat_template->encode(
        *build.tokenizer, need(build.chat_template->render(*build.tokenizer, {{"user", prompt}})));
    request->prompt_is_text_prefix = false;
  } else {
    request->prompt = build.tokenizer->encode(prompt);
  }
  if (request->prompt.empty()) throw invalid("--prompt is empty, and this model has no BOS token");
  int room = build.options.max_model_len - int(request->prompt.size());
  if (room < 1)
    throw invalid("--prompt has " + std::to_string(request->prompt.size()) + " tokens, but the context has " +
                  std::to_string(build.options.max_model_len));
  options.fill(*request);
  request->max_tokens = std::min(room, request->max_tokens);
  request->sampling.seed = build.options.seed;
  request->arrival_s = build.clock.now();

  auto printer = std::make_shared<Printer>();
  if (build.processes)
    signals.handle([&](int) {
      build.runtime->drain();
      build.runtime->abort(request->id);
    });
  const Status elected = build.runtime->stand_by();
  const Status started = elected ? build.runtime->start() : elected;
  const Status taken = started ? build.runtime->submit(request, printer) : started;
  if (taken) printer->wait();
  signals.finish();
  build.runtime->stop();
  if (signals.first()) return 128 + signals.first();
  if (!taken) return fail(" generate", taken.error(), started ? 2 : 0);
  const std::vector<double>& times = printer->times;
  double ttft = times.empty() ? 0 : times.front() - request->arrival_s;
  double tpot = times.size() < 2 ? 0 : (times.back() - times.front()) / double(times.size() - 1);
  std::fprintf(stderr, "\nprompt %zu tokens, output %zu tokens (%s), TTFT %.1f ms, TPOT %.2f ms\n",
               request->prompt.size(), times.size(), finish_reason_name(printer->end.finish), 1e3 * ttft, 1e3 * tpot);
  const uint64_t hash = build.runtime->stats().conductor.logits_hash;
  std::fprintf(stderr, "logits hash %016llx\n", static_cast<unsigned long long>(hash));
  const FinishReason end = printer->end.finish;
  if (end == FinishReason::error || end == FinishReason::refused) throw Error{ErrorCode::io, printer->end.error};
  return 0;
}

}  // namespace xpyd::server
