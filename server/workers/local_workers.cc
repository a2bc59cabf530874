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
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/files.h"
#include "base/log.h"
#include "base/numbers.h"
#include "base/version.h"
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
                     const ProcessOptions& own, std::span<const int> cpus) {
  constexpr std::string_view kOwn[] = {"config", "cluster-key-file", "registry", "cpus"};
  Command arguments = worker_command(options, kOwn);
  if (!cpus.empty()) {
    std::string list;
    for (int cpu : cpus) list += (list.empty() ? "" : "+") + std::to_string(cpu);
    arguments.insert(arguments.end(), {"--cpus", list});
  } else if (options.integer("threads") == 0) {
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

// Child processes that a Supervisor keeps running. Thread safety: any thread.
class Children {
 public:
  Children(std::vector<Command> commands, const SupervisorOptions& options, const ProcessCluster& cluster, Clock& clock)
      : commands_(std::move(commands)),
        cluster_(cluster),
        clock_(clock),
        supervisor_(options, commands_.size()),
        pids_(commands_.size(), -1),
        stopped_(commands_.size()),
        said_(commands_.size()) {}
  ~Children() {
    end();
    for (const Said& said : said_)
      if (said.pipe >= 0) close(said.pipe);
  }

  // Returns when `all_serve`, when `told_to_end`, or when a child has ended, because it would end again.
  Status start(const std::function<bool()>& all_serve, const std::atomic<bool>& told_to_end) {
    std::unique_lock lock(mutex_);
    thread_ = std::thread([this] { keep(); });
    while (!all_serve()) {
      if (told_to_end) return Error{ErrorCode::cancelled, "the server was told to end while the workers started"};
      if (!failed_start_.empty()) return Error{ErrorCode::unavailable, failed_start_};
      wake_.wait_for(lock, std::chrono::milliseconds(20));
    }
    starting_ = false;
    for (size_t i = 0; i < said_.size(); ++i) pass_on(i);
    return ok();
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
      for (size_t i = 0; i < pids_.size(); ++i)
        if (pid_t& pid = pids_[i]; pid > 0 && waitpid(pid, nullptr, WNOHANG) == pid) pid = -1;
    });
    for (size_t i = 0; i < pids_.size(); ++i) pass_on(i);
  }

 private:
  // Starts child i. Its stderr is read here and passed on to the log.
  Status spawn(size_t i) {
    int said[2];
    if (pipe2(said, O_CLOEXEC | O_NONBLOCK) != 0)
      return Error{ErrorCode::io, std::string("the worker cannot be started: ") + std::strerror(errno)};
    if (said_[i].pipe >= 0) close(said_[i].pipe);
    said_[i] = {.pipe = said[0]};
    const Result<pid_t> pid = spawn_self(commands_[i], said[1]);
    close(said[1]);
    if (!pid) return pid.error();
    pids_[i] = pid.value();
    return ok();
  }

  // Logs the lines that worker i has written since the last call.
  void pass_on(size_t i, bool ended = false) {
    Said& said = said_[i];
    char part[4096];
    // Reads at most what the pipe holds. A worker that never stops writing must not delay threads that wait for mutex_.
    ssize_t n;
    for (int reads = 0; reads < 16 && (n = read(said.pipe, part, sizeof part)) > 0; ++reads) {
      said.begun.append(part, size_t(n));
      for (size_t end; (end = said.begun.find('\n')) != std::string::npos;) {
        const std::string line = said.begun.substr(0, end);
        said.begun.erase(0, end + 1);
        // Skips its version and its table of options: the server has logged its own.
        if (!line.starts_with("--") && !line.starts_with("xpyd " + std::string(version()))) say(said.last = line);
      }
    }
    if (!said.begun.empty() && (ended || said.begun.size() > sizeof part))
      say(said.last = std::exchange(said.begun, {}));
  }

  void keep() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      look();
      wake_.wait_for(lock, std::chrono::milliseconds(50));
    }
  }

  void look() {
    std::vector<Presence> seen;
    for (size_t i = 0; i < pids_.size(); ++i) {
      int status = 0;
      bool ended = false;
      while (pids_[i] > 0 && !ended && waitpid(pids_[i], &status, WNOHANG | WUNTRACED | WCONTINUED) == pids_[i]) {
        ended = WIFEXITED(status) || WIFSIGNALED(status);
        stopped_[i] = WIFSTOPPED(status);
      }
      pass_on(i, ended);
      if (ended) {
        const bool retired = cluster_.was_retired(process_name(std::exchange(pids_[i], -1)));
        on_end(i,
               WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                                   : "exit code " + std::to_string(WEXITSTATUS(status)),
               retired && WIFEXITED(status) && WEXITSTATUS(status) == 0);
      }
      seen.push_back(pids_[i] > 0 ? cluster_.presence(process_name(pids_[i])) : Presence::absent);
      if (stopped_[i] && seen[i] == Presence::absent) seen[i] = Presence::stopped;
    }
    const Supervisor::Orders orders = supervisor_.look(seen, clock_.now());
    for (size_t i : orders.kill) {
      log_line(LogLevel::warning, "xpyd: worker %zu does not respond and is killed", i);
      kill(pids_[i], SIGKILL);
    }
    for (size_t i : orders.start)
      if (Status status = spawn(i); !status)
        on_end(i, status.error().message, false);
      else
        supervisor_.started(i, clock_.now());
  }

  void on_end(size_t i, const std::string& how, bool retired) {
    const std::string text = "worker " + std::to_string(i) + " ended: " + how;
    const std::optional<double> wait = supervisor_.ended(i, retired, clock_.now());
    char again[64] = "";
    if (wait) std::snprintf(again, sizeof again, "; it is started again in %.1f s", *wait);
    if (!starting_) log_line(LogLevel::warning, "xpyd: %s%s", text.c_str(), again);
    const std::string& last = said_[i].last;
    if (starting_) failed_start_ = text + ", before all workers served" + (last.empty() ? "" : ": " + last);
  }

  std::vector<Command> commands_;
  const ProcessCluster& cluster_;
  Clock& clock_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable wake_;
  Supervisor supervisor_;
  std::vector<pid_t> pids_;  // -1: none
  std::vector<bool> stopped_;
  struct Said {
    int pipe = -1;
    std::string begun, last;  // unfinished line, last line
  };
  std::vector<Said> said_;  // stderr of each child
  bool starting_ = true, stop_ = false;
  std::string failed_start_;
  std::thread thread_;
};

class LocalWorkers final : public Runtime {
 public:
  LocalWorkers(std::unique_ptr<PrivateFolder> folder, std::unique_ptr<ProcessCluster> cluster,
               std::unique_ptr<Registry> registry, std::vector<Command> commands, const SupervisorOptions& options,
               Clock& clock)
      : folder_(std::move(folder)),
        n_(int(commands.size())),
        cluster_(std::move(cluster)),
        named_{cluster_->address(), cluster_->id()},
        registry_(std::move(registry)),
        children_(std::move(commands), options, *cluster_, clock) {
    if (!registry_) return;
    registry_->announce(kConductorName, named_.value());
    registry_->watch(kConductorName, [this](const Registry::Entries& names) { look_at(names); });
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
  uint64_t logits_hash() const override { return cluster_->logits_hash(); }
  void clear_prefix_caches() override { cluster_->clear_prefix_caches(); }
  Status retire(const std::string& name, std::optional<Role> role) override { return cluster_->retire(name, role); }
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
  // are the other's, or will be when it ends. So it drains and ends, and its supervisor may start it again to stand by.
  // It waits half a second first, because a process that slept hears old news first: the other conductor may be gone.
  void look_at(const Registry::Entries& names) {
    const auto holder = names.find(kConductorName);
    replaced_ = holder != names.end() && holder->second != named_.value();
    open_or_shut();
    if (!replaced_ || !elected_ || draining_ || looks_.exchange(true)) return;
    leaves_ = std::jthread([this, by = NamedConductor::of(holder->second).address] {
      for (int turn = 0; turn < 10; ++turn)
        if (std::this_thread::sleep_for(std::chrono::milliseconds(50)); !replaced_ || draining_) {
          looks_ = false;
          return;
        }
      log_line(LogLevel::warning, "xpyd serve: the conductor at %s has taken over", by.c_str());
      kill(getpid(), SIGTERM);
    });
  }

  std::atomic<bool> draining_ = false, elected_ = false, replaced_ = false, looks_ = false;
  std::mutex door_;
  std::jthread leaves_;
  std::unique_ptr<PrivateFolder> folder_;
  const int n_;
  std::unique_ptr<ProcessCluster> cluster_;
  const NamedConductor named_;
  std::unique_ptr<Registry> registry_;  // null: none
  Children children_;
};

}  // namespace

Supervisor::Orders Supervisor::look(std::span<const Presence> seen, double now) {
  constexpr double kTurn = 1;  // seconds; after a longer gap this process was asleep, and the children were not silent
  const double slept = std::max(0.0, now - looked_s_.value_or(now) - kTurn);
  looked_s_ = now;
  Orders orders;
  for (size_t i = 0; i < children_.size(); ++i) {
    Child& c = children_[i];
    if (c.state == Child::waiting && now >= c.start_at_s) orders.start.push_back(i);
    if (c.state != Child::running) continue;
    c.since_s = std::min(now, c.since_s + slept);
    if (std::exchange(c.seen, seen[i]) != seen[i]) c.since_s = now;
    c.had_channel |= c.seen >= Presence::connected;
    const double lasted = now - c.since_s;
    if (c.seen == Presence::serving) {
      if (lasted >= options_.longest_wait_s) c.ends = 0;
    } else if (lasted > (c.seen == Presence::stopped || (c.seen == Presence::absent && c.had_channel)
                             ? options_.silence_s
                             : options_.start_s)) {
      orders.kill.push_back(i);
      c.since_s = now;
    }
  }
  return orders;
}

void Supervisor::started(size_t child, double now) {
  children_[child] = {.state = Child::running, .ends = children_[child].ends, .since_s = now};
}

std::optional<double> Supervisor::ended(size_t child, bool retired, double now) {
  Child& c = children_[child];
  c.state = retired || !options_.restart ? Child::gone : Child::waiting;
  if (c.state == Child::gone) return {};
  const double wait = std::min(options_.longest_wait_s, std::ldexp(options_.first_wait_s, std::min(c.ends++, 60)));
  c.start_at_s = now + wait;
  return wait;
}

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
                                .limits = limits(build.options),
                                .key = own.read_key(),
                                .fingerprint = fingerprint(build)};
  cluster.conductor.lease_s = own.lease_s;
  cluster.pool = need(make_handoff_pool(build.options));
  cluster.listen = own.bind.empty() ? "unix:" + folder->path() + "/conductor" : own.bind;
  cluster.stands_by = !own.registry_url.empty();
  Result<std::unique_ptr<ProcessCluster>> made = ProcessCluster::create(std::move(cluster), build.clock);
  if (!made) return invalid("--cluster-bind: " + made.error().message);
  std::unique_ptr<Registry> registry = own.open_registry(build.clock);
  std::vector<Command> commands;
  const std::vector<Role>& topology = build.options.topology;
  for (Role role : topology)
    if (own.start_workers)
      commands.push_back(
          arguments_of(options, role, commands.size(), topology.size(), made.value()->address(), own,
                       build.options.cpus.empty() ? std::span<const int>() : build.options.cpus[commands.size()]));
  // A pause of the network must not end a process, so silence lasts 4 leases and at least 5 s. A worker that would not
  // be replaced is not killed for silence.
  SupervisorOptions supervision;
  options.fill(supervision);
  supervision.silence_s = std::max(5.0, 4 * own.lease_s);
  if (!supervision.restart) supervision.silence_s = supervision.start_s = HUGE_VAL;
  return std::unique_ptr<Runtime>(std::make_unique<LocalWorkers>(
      std::move(folder), std::move(made).value(), std::move(registry), std::move(commands), supervision, build.clock));
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server
