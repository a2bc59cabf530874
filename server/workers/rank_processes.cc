#include "server/workers/rank_processes.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "disagg/chunked_pp/stage.h"
#include "server/workers/signals.h"
#include "server/workers/spawn.h"

namespace xpyd::server {
namespace {

// The stage processes of an instance, until it starts them anew.
class StageProcesses final : public ranks::Processes {
 public:
  ~StageProcesses() override {
    end_all(pids_, 1, [this] { look(); });
  }
  Status start(const Command& command) {
    Result<pid_t> pid = spawn_self(command);
    if (!pid) return pid.error();
    pids_.push_back(pid.value());
    return ok();
  }
  Status run() override {
    look();
    for (size_t i = 0; i < pids_.size(); ++i)
      if (pids_[i] < 0)
        return Error{killed_ ? ErrorCode::unavailable : ErrorCode::io,
                     "the process of stage " + std::to_string(i) + " has ended"};
    return ok();
  }

 private:
  void look() {
    for (pid_t& pid : pids_)
      if (int status = 0; pid > 0 && waitpid(pid, &status, WNOHANG) == pid) {
        pid = -1;
        killed_ |= WIFSIGNALED(status);
      }
  }
  std::vector<pid_t> pids_;  // -1: it has ended
  bool killed_ = false;      // by a signal: a new one may live
};

}  // namespace

Status check_rank_processes(const Options& options, const Build& build) {
  const std::string& ranks = options.text("ranks");
  if (ranks == "threads") return ok();
  const ClusterOptions& cluster = build.options;
  const std::string what = "--ranks " + ranks + ": ";
  const bool worker = options.values().contains("role");  // a worker gets the options of the whole cluster
  if (!worker && std::ranges::none_of(cluster.topology, [&](Role role) { return cluster.shards(role).pp > 1; }))
    return invalid(what + "no instance has several pipeline stages: expected --prefill-pp or --decode-pp");
  const std::string transport = cluster.transport->name;
  if (transport != "shm" && transport != "tcp")
    return invalid(what + "--transport " + transport + " cannot carry activations: expected shm or tcp");
  if (ranks == "remote") {
    if (transport != "tcp") return invalid(what + "--transport " + transport + " works on one host only: expected tcp");
    if (cluster.topology[0] == Role::decode)
      return invalid(
          what +
          "--role decode: other instances cannot send KV to stages on other hosts: expected prefill or colocated");
    if (cluster.kv.tiers.on() || !cluster.kv.tiers.disk_dir.empty())
      return invalid(what + "--host-kv-bytes: KV of stages on other hosts cannot be offloaded: expected 0");
  }
  if (cluster.kv.slot_chunk > 0)
    return invalid(what + "--slot-prealloc: stages that are processes allocate all slots at the start: expected all");
  if (cluster.kv_scheme->page_groups)
    return invalid(what + "--allocator " + cluster.kv_scheme->name +
                   ": its page groups are mapped by one process only: expected paged, contiguous or slots");
  return ok();
}

std::string rank_group_name(const Options& options) { return "ranks/" + options.text("rank-group"); }

std::optional<ranks::HeadOptions> head_options(const Options& options, const Build& build, const ClusterKey& key,
                                               Registry* registry) {
  const ClusterOptions& cluster = build.options;
  const bool stages = cluster.shards(cluster.topology[0]).pp > 1;
  if (!stages || options.text("ranks") == "threads") return {};
  ranks::HeadOptions head{.fingerprint = fingerprint(build),
                          .config = build.config,
                          .dtype = matrix_dtype(build.config, build.backend_options.load)};
  if (options.text("ranks") == "remote") {
    head.listen = options.text("rank-bind");
    head.key = key;
    head.far = true;
    if (registry)
      head.start = [registry, name = rank_group_name(options)](const std::string& address, int) {
        registry->announce(name, address);
        return Result<std::unique_ptr<ranks::Processes>>(std::unique_ptr<ranks::Processes>());
      };
    return head;
  }
  // Only processes of this user reach a Unix socket, so they need no key.
  constexpr std::string_view kOwn[] = {"config",    "cluster-key-file", "registry",   "join",    "ranks",
                                       "rank",      "rank-bind",        "rank-group", "give-up", "event-log",
                                       "kv-events", "kv-events-replay", "kv-events-rank"};
  Command command = worker_command(options, kOwn);
  head.start = [command](const std::string& address, int n) -> Result<std::unique_ptr<ranks::Processes>> {
    auto processes = std::make_unique<StageProcesses>();
    for (int stage = 0; stage < n; ++stage) {
      Command own = command;
      own.insert(own.end(), {"--rank", std::to_string(stage), "--join", address, "--give-up", "1"});
      if (Status started = processes->start(own); !started) return started.error();
    }
    return std::unique_ptr<ranks::Processes>(std::move(processes));
  };
  return head;
}

Status serve_stage(const Options& options, const Build& build, const WorkerOptions& worker, SignalThread& signals) {
  const BackendOptions& backend = build.backend_options;
  ranks::StageOptions stage{.stage = int(options.integer("rank")),
                            .join = worker.join,
                            .key = worker.key,
                            .fingerprint = worker.fingerprint,
                            .retry_s = worker.retry_s,
                            .give_up_s = worker.give_up_s,
                            .config = build.config,
                            .dtype = matrix_dtype(build.config, backend.load),
                            .transport_host = worker.cluster.transport_host};
  if (worker.find_conductor) stage.find_head = [find = worker.find_conductor] { return find().address; };
  stage.make_ranks = [&](const KvShards& shards, int own,
                         int step_tokens) -> Result<std::unique_ptr<model::StageRanks>> {
    const int cores = std::max(1, int(std::thread::hardware_concurrency()));
    const int threads = std::max(1, (backend.threads > 0 ? backend.threads : cores) / shards.n_ranks());
    const int total = threads * shards.n_ranks();
    const ShardOptions o{.shards = shards,
                         .threads_per_rank = threads,
                         .whole_experts = backend.whole_experts(build.options.topology[0])};
    const allocator::KvRange layers = shards.layers(own);
    LoadOptions load = backend.load;
    load.layers = {layers.begin, layers.end};
    ThreadTeam loaders(cores);
    auto weights = load_weights(build.model_dir, build.config, load, loaders);
    if (!weights) return weights.error();
    return std::make_unique<model::StageRanks>(weights.value(), o, own, nullptr, step_tokens, ranks::kSlots,
                                               backend.kernels, total > allowed_cpus());
  };
  RealClock clock;
  ranks::Stage process(std::move(stage), clock);
  signals.handle([&process](int) { process.stop(); });
  const Status served = process.run();
  signals.finish();
  return served;
}

}  // namespace xpyd::server
