#include "server/workers/local_workers.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/files.h"
#include "base/log.h"
#include "base/numbers.h"
#include "server/build.h"
#include "server/workers/signals.h"
#include "server/workers/spawn.h"

namespace xpyd::server {
namespace {

const char* role_name(Role role) {
  return role == Role::prefill ? "prefill" : role == Role::decode ? "decode" : "colocated";
}

void write_key(const std::string& path) {
  const ClusterKey key = ClusterKey::random();
  std::string text;  // no line end, because the file is read as it is
  for (char c : key.bytes()) text += hex(uint8_t(c), 2);
  const Fd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const bool written = fd.get() >= 0 && write(fd.get(), text.data(), text.size()) == ssize_t(text.size());
  if (!written) throw Error{ErrorCode::io, path + ": " + std::strerror(errno)};
}

// The command line of a worker: those of this process's options that a worker takes.
Command arguments_of(const Options& options, Role role, size_t instance, size_t n_instances, const std::string& join,
                     const ProcessOptions& own) {
  constexpr std::string_view kOwn[] = {"config", "cluster-key-file", "registry"};
  Command arguments = worker_command(options, kOwn);
  if (options.integer("threads") == 0) {
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    arguments.insert(arguments.end(), {"--threads", std::to_string(std::max<size_t>(1, cores / n_instances))});
  }
  if (!options.text("kv-events").empty())
    arguments.insert(arguments.end(), {"--kv-events-rank", std::to_string(instance)});
  // If no conductor answers for so long, none will be started that a child of this process could find.
  arguments.insert(arguments.end(), {"--role", role_name(role), "--join", join, "--cluster-key-file", own.key_file,
                                     "--give-up", std::to_string(2 * own.lease_s)});
  return arguments;
}

// Child processes. One that ends is started again after a second, unless its exit code was 0: then it was told to
// leave. Thread safety: any thread.
class Children {
 public:
  Children(std::vector<Command> commands, Clock& clock)
      : clock_(clock), commands_(std::move(commands)), pids_(commands_.size(), -1), start_at_s_(commands_.size()) {}
  ~Children() { end(); }

  // Returns when `all_serve`, when `told_to_end`, or when a child has ended, because it would end again.
  Status start(const std::function<bool()>& all_serve, const std::atomic<bool>& told_to_end) {
    std::unique_lock lock(mutex_);
    thread_ = std::thread([this] { keep(); });
    while (!all_serve()) {
      if (told_to_end) return Error{ErrorCode::cancelled, "the server was told to end while the workers started"};
      if (!failed_start_) return failed_start_;
      wake_.wait_for(lock, std::chrono::milliseconds(20));
    }
    starting_ = false;
    return ok();
  }
  // The child that is this process is started again in this role. Other processes may be workers of other hosts.
  void change_role(const std::string& process, Role role) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < pids_.size(); ++i)
      if (pids_[i] > 0 && process_name(pids_[i]) == process)
        *std::next(std::find(commands_[i].begin(), commands_[i].end(), "--role")) = role_name(role);
  }
  // From now on no child is started or logged.
  void let_go() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }
  // Tells the children to end, waits for a while, then kills them.
  void end() {
    let_go();
    end_all(pids_, 2, [this] {
      for (pid_t& pid : pids_)
        if (pid > 0 && waitpid(pid, nullptr, WNOHANG) == pid) pid = -1;
    });
  }

 private:
  void keep() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      for (size_t i = 0; i < pids_.size(); ++i) look(i);
      wake_.wait_for(lock, std::chrono::milliseconds(50));
    }
  }

  void look(size_t i) {
    if (int status = 0; pids_[i] > 0 && waitpid(pids_[i], &status, WNOHANG) == pids_[i]) {
      pids_[i] = -1;
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      ended(i, {code == 2 ? ErrorCode::invalid_argument : ErrorCode::unavailable,
                code < 0 ? "signal " + std::to_string(WTERMSIG(status)) : "exit code " + std::to_string(code)});
      if (code == 0) start_at_s_[i] = HUGE_VAL;
    }
    if (pids_[i] > 0 || clock_.now() < start_at_s_[i]) return;
    const Result<pid_t> pid = spawn_self(commands_[i]);
    if (pid)
      pids_[i] = pid.value();
    else
      ended(i, pid.error());
  }

  void ended(size_t i, const Error& how) {
    const std::string text = "worker " + std::to_string(i) + " ended: " + how.message;
    if (starting_)
      failed_start_ = Error{how.code, text + ", before all workers served"};
    else
      log_line(LogLevel::warning, "xpyd: %s", text.c_str());
    start_at_s_[i] = clock_.now() + 1;
  }

  Clock& clock_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable wake_;
  std::vector<Command> commands_;
  std::vector<pid_t> pids_;         // -1: none
  std::vector<double> start_at_s_;  // while there is none
  bool starting_ = true, stop_ = false;
  Status failed_start_ = ok();
  std::thread thread_;
};

class LocalWorkers final : public Runtime {
 public:
  LocalWorkers(std::unique_ptr<PrivateFolder> folder, std::unique_ptr<ProcessCluster> cluster,
               std::unique_ptr<Registry> registry, std::vector<Command> commands, Clock& clock)
      : folder_(std::move(folder)),
        n_(int(commands.size())),
        cluster_(std::move(cluster)),
        named_{cluster_->address(), cluster_->id()},
        registry_(std::move(registry)),
        children_(std::move(commands), clock) {
    if (!registry_) return;
    registry_->announce(kConductorName, named_.value());
    registry_->watch(kConductorName, [this](const std::string& holder) { look_at(holder); });
  }
  ~LocalWorkers() override { stop(); }

  Status stand_by() override {
    constexpr int kQuiet = 20;  // in turns; an election without a rival is not logged
    for (int turn = 0; registry_; ++turn) {
      const RegistryState now = registry_->state();
      if (now.held.contains(kConductorName)) break;
      if (draining_) return Error{ErrorCode::cancelled, "the server was told to end while another conductor served"};
      if (turn == kQuiet)
        log_line(LogLevel::info, "xpyd serve: this conductor stands by, without an HTTP port: %s",
                 now.trouble.empty() ? "the registry has not answered" : now.trouble.c_str());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    elected_ = true;
    open_or_shut();
    return ok();
  }
  Status start() override {
    if (draining_) return Error{ErrorCode::cancelled, "the server was told to end before it served"};
    return children_.start([this] { return cluster_->wait_members(n_, 0); }, draining_);
  }
  void drain() override {
    draining_ = true;
    if (registry_) registry_->withdraw(kConductorName);
    cluster_->drain();
  }
  bool wait_idle(double seconds) override { return cluster_->wait_idle(seconds); }
  void stop() override {
    children_.let_go();
    cluster_->stop();
    children_.end();
  }
  void clear_prefix_caches() override { cluster_->clear_prefix_caches(); }
  Status retire(const std::string& name, std::optional<Role> role) override {
    const std::string process = cluster_->process_of(name);
    Status told = cluster_->retire(name, role);
    if (told && role) children_.change_role(process, *role);
    return told;
  }
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override {
    return cluster_->submit(std::move(request), std::move(sink));
  }
  void abort(uint64_t request_id) override { cluster_->abort(request_id); }
  ServiceStats stats() const override { return cluster_->stats(); }
  ServicePicture picture() const override { return cluster_->picture(); }
  std::string trouble() const override { return cluster_->trouble(); }

 private:
  // Workers belong to the conductor that holds the name. A conductor that stands by or has been replaced takes none.
  void open_or_shut() {
    std::lock_guard lock(door_);
    cluster_->take_workers(elected_ && !replaced_);
  }

  // A conductor whose lease ended while it could not reach etcd may find that another one has been elected. Its workers
  // are the other's, or will be when it ends. So it drains and ends, and may be started again to stand by.
  void look_at(const std::string& holder) {
    replaced_ = !holder.empty() && holder != named_.value();
    open_or_shut();
    if (!replaced_ || !elected_ || draining_) return;
    log_line(LogLevel::warning, "xpyd serve: the conductor at %s has taken over",
             NamedConductor::of(holder).address.c_str());
    kill(getpid(), SIGTERM);
  }

  std::atomic<bool> draining_ = false, elected_ = false, replaced_ = false;
  std::mutex door_;
  std::unique_ptr<PrivateFolder> folder_;
  const int n_;
  std::unique_ptr<ProcessCluster> cluster_;
  const NamedConductor named_;
  std::unique_ptr<Registry> registry_;  // null: none
  Children children_;
};

}  // namespace

ClusterKey ProcessOptions::read_key() const { return need(ClusterKey::from_file(key_file), "--cluster-key-file: "); }

std::unique_ptr<Registry> ProcessOptions::open_registry(Clock& clock) const {
  if (registry_url.empty()) return nullptr;
  return need(open_etcd(registry_url, kRegistryTtlSeconds, clock), "--registry: ");
}

Result<std::unique_ptr<Runtime>> make_local_workers(Build& build, const Options& options) try {
  SignalThread::hold();  // from here on there is a folder with a key to remove, and workers to end
  auto folder = std::make_unique<PrivateFolder>();
  if (folder->path().empty())
    return Error{ErrorCode::io, std::string("a temporary folder cannot be created: ") + std::strerror(errno)};
  ProcessOptions own;
  options.fill(own);
  if (own.key_file.empty()) {
    own.key_file = folder->path() + "/key";
    write_key(own.key_file);
  }
  ProcessClusterOptions cluster{.conductor = conductor_options(build.options),
                                .key = own.read_key(),
                                .fingerprint = fingerprint(build)};
  cluster.conductor.lease_s = own.lease_s;
  cluster.listen = own.bind.empty() ? "unix:" + folder->path() + "/conductor" : own.bind;
  cluster.stands_by = !own.registry_url.empty();
  Result<std::unique_ptr<ProcessCluster>> made = ProcessCluster::create(std::move(cluster), build.clock);
  if (!made) return invalid("--cluster-bind: " + made.error().message);
  std::unique_ptr<Registry> registry = own.open_registry(build.clock);
  std::vector<Command> commands;
  const std::vector<Role>& topology = build.options.topology;
  for (Role role : topology)
    if (own.start_workers)
      commands.push_back(arguments_of(options, role, commands.size(), topology.size(), made.value()->address(), own));
  return std::unique_ptr<Runtime>(std::make_unique<LocalWorkers>(
      std::move(folder), std::move(made).value(), std::move(registry), std::move(commands), build.clock));
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server
