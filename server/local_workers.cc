#include "server/local_workers.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "base/private_folder.h"
#include "disagg/process_cluster.h"
#include "server/etcd_registry.h"
#include "server/options.h"
#include "server/stack.h"

namespace xpyd {
namespace {

const char* role_name(Role role) {
  return role == Role::prefill ? "prefill" : role == Role::decode ? "decode" : "colocated";
}

Status write_key(const std::string& path) {
  const ClusterKey key = ClusterKey::random();
  std::string text;  // no line end in it, so that it is read as it is
  for (char c : key.bytes()) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", unsigned(uint8_t(c)));
    text += hex;
  }
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size());
  if (fd >= 0) close(fd);
  if (written) return ok();
  return Error{ErrorCode::io, path + ": " + std::strerror(errno)};
}

// The command line of a worker: this one's options, as far as they are a worker's.
std::vector<std::string> arguments_of(const Options& options, Role role, size_t n_instances,
                                      const std::string& join, const std::string& key_file) {
  std::vector<std::string> arguments = {"xpyd", "worker"};
  if (!options.positional().empty()) arguments.push_back(options.positional()[0]);
  for (const OptionRow& row : option_table()) {
    const std::string name = row.name;
    if ((" " + std::string(row.group) + " ").find(" worker ") == std::string::npos ||
        name == "config" || name == "cluster-key-file" || name == "registry" ||
        !options.values().contains(name) || !options.given(name))
      continue;
    if (row.kind == OptionKind::flag) {
      if (options.flag(name)) arguments.push_back("--" + name);
    } else {
      arguments.insert(arguments.end(), {"--" + name, options.values().at(name)});
    }
  }
  if (options.integer("threads") == 0) {
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    arguments.insert(arguments.end(),
                     {"--threads", std::to_string(std::max<size_t>(1, cores / n_instances))});
  }
  // Without a conductor for so long, nobody will start one that a child of this process could find.
  const double alone_s = 2 * options.number("lease");
  arguments.insert(arguments.end(), {"--role", role_name(role), "--join", join,
                                     "--cluster-key-file", key_file, "--give-up",
                                     std::to_string(alone_s)});
  return arguments;
}

// Child processes, kept running. Thread safety: any thread.
class Children {
 public:
  Children(std::vector<std::vector<std::string>> commands, bool restart)
      : commands_(std::move(commands)), restart_(restart) {}
  ~Children() { stop(); }

  Status start() {
    pids_.assign(commands_.size(), -1);
    for (size_t i = 0; i < commands_.size(); ++i)
      if (Status started = spawn(i); !started) return started;
    thread_ = std::thread([this] { keep(); });
    return ok();
  }

  // They have been told to end: waits a while for it, then ends them.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
      stop_ = true;
      wake_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    for (pid_t pid : pids_)
      if (pid > 0) kill(pid, SIGTERM);
    for (int i = 0; i < 100 && running(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (pid_t& pid : pids_) {
      if (pid <= 0) continue;
      kill(pid, SIGKILL);
      kill(pid, SIGCONT);
      waitpid(pid, nullptr, 0);
      pid = -1;
    }
  }

 private:
  // In a process group of its own: a Ctrl-C at the terminal is the parent's to handle.
  Status spawn(size_t i) {
    std::vector<char*> argv;
    for (std::string& argument : commands_[i]) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none, standard;
    sigemptyset(&none);
    sigemptyset(&standard);
    sigaddset(&standard, SIGPIPE);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &standard);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                              POSIX_SPAWN_SETPGROUP);
    const int error =
        posix_spawn(&pids_[i], "/proc/self/exe", nullptr, &attributes, argv.data(), environ);
    posix_spawnattr_destroy(&attributes);
    if (error == 0) return ok();
    pids_[i] = -1;
    return Error{ErrorCode::io, std::string("a worker cannot be started: ") + std::strerror(error)};
  }

  bool running() {
    bool any = false;
    for (pid_t& pid : pids_) {
      if (pid > 0 && waitpid(pid, nullptr, WNOHANG) == pid) pid = -1;
      any |= pid > 0;
    }
    return any;
  }

  void keep() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      for (size_t i = 0; i < pids_.size(); ++i) {
        int status = 0;
        if (pids_[i] <= 0 || waitpid(pids_[i], &status, WNOHANG) != pids_[i]) continue;
        const std::string how = WIFSIGNALED(status)
                                    ? "signal " + std::to_string(WTERMSIG(status))
                                    : "exit code " + std::to_string(WEXITSTATUS(status));
        pids_[i] = -1;
        const bool retired = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        const bool misuse = WIFEXITED(status) && WEXITSTATUS(status) == 2;
        const bool again = restart_ && !retired && !misuse;
        std::fprintf(stderr, "xpyd: worker %zu ended: %s%s\n", i, how.c_str(),
                     again ? "; it is started again" : "");
        if (!again) continue;
        if (Status started = spawn(i); !started)
          std::fprintf(stderr, "xpyd: %s\n", started.error().message.c_str());
      }
      wake_.wait_for(lock, std::chrono::milliseconds(100));
    }
  }

  std::vector<std::vector<std::string>> commands_;
  const bool restart_;
  std::vector<pid_t> pids_;  // the keeper's while it runs
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

class LocalWorkers final : public Runtime {
 public:
  LocalWorkers(std::unique_ptr<PrivateFolder> folder, std::unique_ptr<ProcessCluster> cluster,
               std::unique_ptr<Registry> registry, std::vector<std::vector<std::string>> commands,
               bool restart)
      : folder_(std::move(folder)),
        n_(int(commands.size())),
        cluster_(std::move(cluster)),
        registry_(std::move(registry)),
        children_(std::move(commands), restart) {}
  ~LocalWorkers() override { stop(); }

  Status start() override {
    constexpr double kPatience = 120;  // seconds: for reading a large model
    if (Status started = children_.start(); !started) return started;
    if (cluster_->wait_members(n_, kPatience)) return ok();
    return Error{ErrorCode::unavailable, "the workers did not join; their messages say why"};
  }
  void drain() override {
    if (registry_) registry_->withdraw(kConductorName);
    cluster_->drain();
  }
  bool wait_idle(double seconds) override { return cluster_->wait_idle(seconds); }
  void stop() override {
    cluster_->stop();
    children_.stop();
  }
  uint64_t logits_hash() const override { return cluster_->logits_hash(); }
  void clear_prefix_caches() override { cluster_->clear_prefix_caches(); }
  Status retire(const std::string& name, std::optional<Role> role) override {
    return cluster_->retire(name, role);
  }
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override {
    return cluster_->submit(std::move(request), std::move(sink));
  }
  void abort(uint64_t request_id) override { cluster_->abort(request_id); }
  ServiceStats stats() const override { return cluster_->stats(); }
  bool healthy() const override { return cluster_->healthy(); }

 private:
  std::unique_ptr<PrivateFolder> folder_;
  const int n_;
  std::unique_ptr<ProcessCluster> cluster_;
  std::unique_ptr<Registry> registry_;  // null: none
  Children children_;
};

}  // namespace

Result<std::unique_ptr<Runtime>> make_local_workers(const Stack& stack, const Options& options) {
  auto folder = std::make_unique<PrivateFolder>();
  if (folder->path().empty())
    return Error{ErrorCode::io,
                 std::string("no temporary folder can be made: ") + std::strerror(errno)};
  std::string key_file = options.text("cluster-key-file");
  if (key_file.empty()) {
    key_file = folder->path() + "/key";
    if (Status written = write_key(key_file); !written) return written.error();
  }
  Result<ClusterKey> key = ClusterKey::from_file(key_file);
  if (!key) return Error{key.error().code, "--cluster-key-file: " + key.error().message};
  ProcessClusterOptions cluster{.conductor = conductor_options(stack.options),
                                .key = key.value(),
                                .fingerprint = fingerprint(stack)};
  cluster.conductor.lease_s = options.number("lease");
  Result<std::shared_ptr<HandoffPool>> pool = make_handoff_pool(stack.options);
  if (!pool) return pool.error();
  cluster.pool = std::move(pool).value();
  cluster.listen = options.text("cluster-bind");
  if (cluster.listen.empty()) cluster.listen = "unix:" + folder->path() + "/conductor";
  Result<std::unique_ptr<ProcessCluster>> made =
      ProcessCluster::create(std::move(cluster), const_cast<Stack&>(stack).clock);
  if (!made) return Error{made.error().code, "--cluster-bind: " + made.error().message};
  std::unique_ptr<Registry> registry;
  if (const std::string& url = options.text("registry"); !url.empty()) {
    Result<std::unique_ptr<Registry>> opened =
        open_etcd(url, kRegistryTtlSeconds, const_cast<Stack&>(stack).clock);
    if (!opened) return Error{opened.error().code, "--registry: " + opened.error().message};
    registry = std::move(opened).value();
    registry->announce(kConductorName, made.value()->address());
  }
  std::vector<std::vector<std::string>> commands;
  const std::vector<Role>& topology = stack.options.topology;
  for (Role role : topology)
    commands.push_back(
        arguments_of(options, role, topology.size(), made.value()->address(), key_file));
  return std::unique_ptr<Runtime>(std::make_unique<LocalWorkers>(
      std::move(folder), std::move(made).value(), std::move(registry), std::move(commands),
      options.flag("restart-workers")));
}

}  // namespace xpyd
