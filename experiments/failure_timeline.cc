// failure_timeline: What do clients see if a worker process is killed or stopped, with another worker of its role and
//   without?
// Paper: no figure is published.
// Set-up: real worker processes (xpyd worker) under a conductor in this process, over tcp, llama-tiny, with eight
//   requests in flight. After 1.5 s one worker is killed or stopped. A new one starts as soon as its end is noticed.
//   Every request's tokens are compared with the undisturbed ones. Rows are slices of 50 ms; each repeats the results
//   of the whole run. /copies: one of two D is killed 24 times, without and with --decode-copies 2; llama-mini and 64
//   prompts of 256 tokens in turn, more than a cache holds. A row is a request that lost its D.
// Command: make exp-failure_timeline (4 minutes; measured, counted).
// Expected: a killed process is noticed in milliseconds, a stopped one when its lease of .5 s ends. If another worker
//   has its role, prompt and tokens are computed again there: milliseconds. Else a new one takes up to .7 s. llama-mini
//   computes 256 tokens in .15 s, behind up to four prompts: .15 to .75 s; with a copy at most 136 tokens: .01 to .1 s.
//   A fifth of the copies is still on its way: (.8 * .05 + .2 * .45) / .45 = .3 of the mean wait, .05 to .6.
// Found: no request is lost; a host's loss costs 3.1 s. With a copy the median wait is .2 s, .5 without; a third of the
//   copies comes too late.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "base/files.h"
#include "disagg/processes/process_cluster.h"
#include "experiments/experiment.h"
#include "server/build.h"

namespace xpyd::experiments::failure_timeline_experiment {
namespace {

namespace worker {

constexpr double kLease = 0.5, kSlice = 0.05;  // seconds

// The program whose workers are killed. It lies beside this program; "" if it is missing.
std::string program() {
  if (const char* named = std::getenv("XPYD_BIN")) return named;
  std::error_code error;
  const auto beside = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "xpyd";
  return std::filesystem::exists(beside, error) ? beside.string() : "";
}

struct Scene {
  const char *name, *topology;
  Role victim;
  int signal;
  int copies = 1;
  int prompts = 4, prompt = 50, output = 180;  // number; tokens of each and of its answer
  const char *model = "llama-tiny", *kv_bytes = "4MiB";
};
const std::vector<Scene>& scenes() {
  static const std::vector<Scene> all = {
      {"the only D", "1P1D", Role::decode, SIGKILL},
      {"one of two D", "1P2D", Role::decode, SIGKILL},
      {"the only P", "1P1D", Role::prefill, SIGKILL},
      {"one of two D, stopped", "1P2D", Role::decode, SIGSTOP}};
  return all;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  if (program().empty()) return all;
  for (const Scene& scene : scenes()) all.push_back({{"victim", scene.name}});
  return all;
}

class Child {
 public:
  Child() = default;
  explicit Child(std::vector<std::string> words) {
    words.insert(words.begin(), {program(), "worker"});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 2, "/dev/null", 1 /* O_WRONLY */, 0);
    if (posix_spawn(&pid_, argv[0], &files, nullptr, argv.data(), environ) != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&files);
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Child& operator=(Child&& other) noexcept {
    std::swap(pid_, other.pid_);
    return *this;
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void kill(int signal) { ::kill(pid_, signal); }
  bool has_ended() {
    if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
    return pid_ < 0;
  }

 private:
  pid_t pid_ = -1;
};

// The tokens that eight clients have received. Any thread may call it.
class Clients final : public EventSink {
 public:
  struct One {
    int prompt = 0;
    std::vector<int32_t> tokens;
    std::vector<double> at_s;
    bool ended = false;
    std::string wrong;
  };
  explicit Clients(Clock& clock) : clock_(clock) {}
  void on_event(TokenEvent event) override {
    std::lock_guard lock(mutex_);
    One& one = all_[event.request_id];
    if (one.ended) one.wrong = "the request got an event after its end";
    if (event.token >= 0) {
      one.tokens.push_back(event.token);
      one.at_s.push_back(clock_.now());
    }
    if (event.finish == FinishReason::none) return;
    one.ended = true;
    if (event.finish != FinishReason::length)
      one.wrong = std::string(finish_reason_name(event.finish)) + " " + event.error;
  }
  void add(uint64_t id, int prompt) {
    std::lock_guard lock(mutex_);
    all_[id].prompt = prompt;
  }
  void forget(uint64_t id) {
    std::lock_guard lock(mutex_);
    all_.erase(id);
  }
  int open() {
    std::lock_guard lock(mutex_);
    return int(std::count_if(all_.begin(), all_.end(), [](const auto& e) { return !e.second.ended; }));
  }
  const std::map<uint64_t, One>& all() const { return all_; }  // requires that nothing is in flight

 private:
  Clock& clock_;
  std::mutex mutex_;
  std::map<uint64_t, One> all_;
};

// The cluster of a scene, its workers, and clients that keep eight requests in flight.
class Deployment {
 public:
  static Result<std::unique_ptr<Deployment>> make(const Scene& scene, const Setting& setting) {
    auto deployment = std::unique_ptr<Deployment>(new Deployment(scene, setting));
    if (Status begun = deployment->begin(); !begun) return begun.error();
    return deployment;
  }
  ~Deployment() { stop(); }
  void stop() {
    if (cluster_) cluster_->stop();
    children_.clear();
  }

  Clock& clock() { return build_->clock; }
  ProcessCluster& cluster() { return *cluster_; }
  Clients& clients() { return *clients_; }
  int refused() const { return refused_; }
  Child& victim() { return children_[victim_]; }
  void replace_victim() {  // starts another worker of its role
    children_.push_back(worker(scene_.victim));
    victim_ = children_.size() - 1;
  }
  void keep_busy() {
    for (int missing = 8 - clients_->open(); missing > 0 && ask(); --missing) {
    }
  }
  // KV bytes that were sent, of them copies; blocks that D evicted; requests whose KV the last D has.
  struct Sent {
    int64_t bytes = 0, copies = 0, evicted = 0;
    int decoding = 0;
  };
  Sent sent() {
    Sent sent;
    for (const InstanceStats& s : cluster_->stats().instances) {
      sent.bytes += s.transfer_bytes, sent.copies += s.fetch.copy_bytes;
      if (s.name[0] != 'D') continue;
      sent.evicted += s.kv.evictions;
      sent.decoding = s.running + s.waiting;
    }
    return sent;
  }
  // Counts requests that were lost or whose tokens differ from the answers before `until_s`.
  struct Answers {
    int lost = 0, wrong = 0;
  };
  Answers answers(double until_s) const {
    std::map<int, std::vector<int32_t>> known;  // the undisturbed answer of each prompt
    for (const auto& [id, one] : clients_->all())
      if (one.ended && !one.at_s.empty() && one.at_s.back() < until_s) known.try_emplace(one.prompt, one.tokens);
    Answers answers;
    for (const auto& [id, one] : clients_->all()) {
      answers.lost += !one.ended || !one.wrong.empty();
      const auto expected = known.find(one.prompt);
      answers.wrong += expected == known.end() || one.tokens != expected->second;
    }
    return answers;
  }
  // Times from the signal to the next token, longest first, of the `n` requests that waited longest. Requests that are
  // placed again are those.
  std::vector<double> waits(double hit_s, int64_t n) const {
    std::vector<double> waits;
    for (const auto& [id, one] : clients_->all())
      for (size_t t = 1; t < one.at_s.size(); ++t)
        if (one.at_s[t - 1] < hit_s && one.at_s[t] >= hit_s) waits.push_back(one.at_s[t] - hit_s);
    std::sort(waits.rbegin(), waits.rend());
    waits.resize(std::min(waits.size(), size_t(n)));
    return waits;
  }

 private:
  Deployment(const Scene& scene, const Setting& setting)
      : scene_(scene),
        output_(setting.tiny ? 40 : scene.output),
        prompts_(setting.tiny ? 4 : scene.prompts),
        prompt_tokens_(setting.tiny ? 50 : scene.prompt),
        common_{std::string("experiments/models/") + scene.model,
                "--load-format",
                "dummy",
                "--kv-bytes",
                scene.kv_bytes,
                "--max-model-len",
                std::to_string(scene.prompt + scene.output),
                "--max-batch",
                "8",
                "--threads",
                "1",
                "--transport",
                "tcp"} {}

  Status begin() {
    std::vector<std::string> words = common_;
    words.insert(words.end(),
                 {"--processes", "--topology", scene_.topology, "--decode-copies", std::to_string(scene_.copies)});
    Result<Options> options = Options::parse(option_table(), "serve", words, 1);
    if (!options) return options.error();
    Result<std::unique_ptr<Build>> build = prepare_build(options.value());
    if (!build) return build.error();
    build_ = std::move(build).value();
    if (folder_.path().empty()) return Error{ErrorCode::io, "cannot create a temporary folder"};
    ProcessClusterOptions cluster_options{.conductor = conductor_options(build_->options),
                                          .listen = "unix:" + folder_.path() + "/conductor",
                                          .fingerprint = fingerprint(*build_)};
    cluster_options.conductor.lease_s = kLease;
    auto made = ProcessCluster::create(std::move(cluster_options), build_->clock);
    if (!made) return made.error();
    cluster_ = std::move(made).value();
    const std::vector<Role> roles = parse_topology(scene_.topology).value();
    for (size_t i = 0; i < roles.size(); ++i) {
      children_.push_back(worker(roles[i]));
      if (roles[i] == scene_.victim) victim_ = i;
    }
    if (!cluster_->wait_members(int(roles.size()), 60)) return invalid("the workers did not join within 60 s");
    clients_ = std::make_shared<Clients>(build_->clock);
    for (int i = 0; i < prompts_; ++i) ask();  // the undisturbed answers
    if (!cluster_->wait_idle(60)) return invalid("the first requests did not end within 60 s");
    return ok();
  }
  Child worker(Role role) {
    std::vector<std::string> arguments = common_;
    arguments.insert(arguments.end(), {"--role", role == Role::prefill ? "prefill" : "decode", "--join",
                                       cluster_->address(), "--give-up", "5"});
    return Child(std::move(arguments));
  }
  bool ask() {
    auto request = std::make_shared<Request>();
    request->id = ++last_id_;
    const int prompt = int(last_id_ % uint64_t(prompts_));
    for (int t = 0; t < prompt_tokens_; ++t) request->prompt.push_back(3 + (t * 7 + prompt * 13) % 150);
    request->sampling.temperature = 0;
    request->max_tokens = output_;
    request->ignore_eos = true;
    request->arrival_s = build_->clock.now();
    clients_->add(last_id_, prompt);
    if (cluster_->submit(request, clients_)) return true;
    clients_->forget(last_id_);
    ++refused_;
    return false;
  }

  const Scene& scene_;
  const int output_, prompts_, prompt_tokens_;
  const std::vector<std::string> common_;  // options of all processes
  const PrivateFolder folder_;
  std::unique_ptr<Build> build_;
  std::unique_ptr<ProcessCluster> cluster_;
  std::vector<Child> children_;
  size_t victim_ = 0;
  std::shared_ptr<Clients> clients_;
  uint64_t last_id_ = 0;
  int refused_ = 0;
};

const Scene& scene_of(const Values& point) {
  return *std::find_if(scenes().begin(), scenes().end(), [&](const Scene& s) { return point["victim"] == s.name; });
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const Scene& scene = scene_of(point);
  const double before_s = setting.tiny ? 0.3 : 1.5, after_s = setting.tiny ? 0.3 : 2.5;
  Result<std::unique_ptr<Deployment>> made = Deployment::make(scene, setting);
  if (!made) return made.error();
  Deployment& deployment = *made.value();
  ProcessCluster& cluster = deployment.cluster();
  Clock& clock = deployment.clock();
  std::set<InstanceId> first_members;
  for (const InstanceInfo& info : cluster.conductor().members()) first_members.insert(info.id);
  const int n_members = int(first_members.size());
  const double hit_at = clock.now() + before_s;
  double hit_s = -1, looked_s = 0;
  double noticed_s = -1, replaced_s = -1, started_s = -1, joined_s = -1;
  while (clock.now() < hit_at + after_s) {
    const double now = clock.now();
    deployment.keep_busy();
    if (hit_s < 0 && now >= hit_at) {
      hit_s = clock.now();
      deployment.victim().kill(scene.signal);
    }
    if (hit_s >= 0) {
      const std::vector<InstanceInfo> members = cluster.conductor().members();
      int old = 0;
      for (const InstanceInfo& info : members) old += first_members.contains(info.id);
      if (noticed_s < 0 && old < n_members) noticed_s = now - hit_s;
      if (replaced_s < 0 && cluster.conductor().stats().conductor.replaced_choices > 0) replaced_s = now - hit_s;
      if (joined_s < 0 && int(members.size()) > old) joined_s = now - hit_s;
      if (started_s < 0 && now >= looked_s + 0.1) {
        looked_s = now;
        const bool over = scene.signal == SIGKILL ? deployment.victim().has_ended() : noticed_s >= 0;
        if (over) {
          started_s = now - hit_s;
          deployment.replace_victim();
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool all_ended = cluster.wait_idle(60);
  const ConductorStats totals = cluster.conductor().stats().conductor;
  deployment.stop();

  Finding found;
  if (!all_ended) found.wrong = "some requests did not end within 60 s";
  const Deployment::Answers answers = deployment.answers(hit_s);
  const std::vector<double> waits = deployment.waits(hit_s, totals.replaced_choices);
  double worst_gap = 0, silence = 0;
  std::vector<double> times;
  for (const auto& [id, one] : deployment.clients().all()) {
    for (size_t t = 1; t < one.at_s.size(); ++t) worst_gap = std::max(worst_gap, one.at_s[t] - one.at_s[t - 1]);
    times.insert(times.end(), one.at_s.begin(), one.at_s.end());
  }
  std::sort(times.begin(), times.end());
  for (size_t i = 1; i < times.size(); ++i)
    if (times[i] > hit_s) silence = std::max(silence, times[i] - std::max(hit_s, times[i - 1]));
  const int first = -int(before_s / kSlice), end = int(after_s / kSlice);
  for (int slice = first; slice < end; ++slice) {
    const double from = hit_s + slice * kSlice;
    const auto tokens = std::lower_bound(times.begin(), times.end(), from + kSlice) -
                        std::lower_bound(times.begin(), times.end(), from);
    found.rows.push_back({{"from_ms", int(1e3 * kSlice) * slice},
                          {"tokens_per_s", double(tokens) / kSlice},
                          {"noticed_ms", 1e3 * noticed_s},
                          {"replaced_ms", 1e3 * replaced_s},
                          {"started_ms", 1e3 * started_s},
                          {"joined_ms", 1e3 * joined_s},
                          {"silence_ms", 1e3 * silence},
                          {"worst_gap_ms", 1e3 * worst_gap},
                          {"next_token_ms", waits.empty() ? 0 : 1e3 * waits[waits.size() / 2]},
                          {"replaced", totals.replaced_choices},
                          {"refused", deployment.refused()},
                          {"requests", int(deployment.clients().all().size())},
                          {"lost", answers.lost},
                          {"wrong", answers.wrong}});
  }
  return found;
}

REGISTER_EXPERIMENT("failure_timeline", "cpu", points, each<run>);

// ---- /copies: one of two D is killed again and again. A row is a request that had a token from it, and the kills take
// turns in three samples. The prompts come in turn and are more than a cache holds, so only a copy is found.

constexpr int kSamples = 3;

std::vector<Values> copies_points(const Setting&) {
  std::vector<Values> all;
  if (!program().empty())
    for (int copies : {1, 2}) all.push_back({{"copies", copies}});
  return all;
}

Result<Finding> run_copies(const Values& point, const Setting& setting) {
  const Scene scene{"one of two D", "1P2D", Role::decode, SIGKILL, int(point["copies"]), 64, 256, 120, "llama-mini",
                    "32MiB"};
  const int kills = setting.tiny ? kSamples : 8 * kSamples;
  const double load_s = setting.tiny ? 0.2 : 1;  // before each kill
  Result<std::unique_ptr<Deployment>> made = Deployment::make(scene, setting);
  if (!made) return made.error();
  Deployment& deployment = *made.value();
  ProcessCluster& cluster = deployment.cluster();
  Clock& clock = deployment.clock();
  const auto busy_until = [&](double until_s, const auto& over) {
    for (; clock.now() < until_s && !over(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      deployment.keep_busy();
    return over();
  };
  const auto never = [] { return false; };
  struct Kill {
    double hit_s;
    int64_t replaced;
    Deployment::Sent sent;
  };
  std::vector<Kill> all;
  double first_s = 0;
  for (int kill = 0; kill < kills; ++kill) {
    busy_until(clock.now() + load_s, never);
    const Deployment::Sent sent = deployment.sent();
    const int64_t before = cluster.conductor().stats().conductor.replaced_choices;
    const double hit_s = clock.now();
    if (kill == 0) first_s = hit_s;
    deployment.victim().kill(SIGKILL);
    if (!busy_until(hit_s + 60, [&] { return cluster.conductor().members().size() == 2; }))
      return invalid("the conductor did not notice a kill within 60 s");
    while (!deployment.victim().has_ended()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    deployment.replace_victim();
    if (!busy_until(hit_s + 60, [&] { return cluster.conductor().members().size() == 3; }))
      return invalid("a new worker did not join within 60 s");
    all.push_back({hit_s, cluster.conductor().stats().conductor.replaced_choices - before, sent});
  }
  const bool all_ended = cluster.wait_idle(60);
  deployment.stop();

  Finding found;
  if (!all_ended) found.wrong = "some requests did not end within 60 s";
  const Deployment::Answers answers = deployment.answers(first_s);
  if (answers.lost + answers.wrong > 0)
    found.wrong = std::to_string(answers.lost) + " requests were lost, and " + std::to_string(answers.wrong) +
                  " have other tokens than before the first kill";
  for (int kill = 0; kill < kills; ++kill) {
    const Kill& hit = all[size_t(kill)];
    for (double wait : deployment.waits(hit.hit_s, std::min<int64_t>(hit.replaced, hit.sent.decoding)))
      found.rows.push_back({{"sample", kill % kSamples},
                            {"kill", kill},
                            {"next_token_ms", 1e3 * wait},
                            {"sent_bytes", hit.sent.bytes},
                            {"copied_bytes", hit.sent.copies},
                            {"evicted", hit.sent.evicted},
                            {"requests", int(deployment.clients().all().size())}});
  }
  return found;
}

REGISTER_EXPERIMENT("failure_timeline/copies", "cpu", copies_points, each<run_copies>);

}  // namespace worker

// failure_timeline/pool_recovery runs tests/netns/run: four hosts as network namespaces, the demo model on 3P2D with
// two conductors and etcd. A host is cut off or dies, links lose half of their rate, the conductor's host dies, or the
// conductor loses etcd. It needs root, iproute2 and etcd.
//
// Expected: a lease of 3 s plus .2 to 1 s to compute elsewhere: 3 to 4.5 s. A host comes back in .3 to 3 s. Half of the
// rate: 0 to 1.5 s. A conductor's lease is 5 s: 5 to 9 s. A conductor that is cut off from etcd continues until another
// is elected: .3 to 3 s.
namespace hosts {

std::vector<Values> points(const Setting& setting) {
  if (setting.tiny) return {};  // hosts die no faster in a test
  return {{{"rounds", 2}}};
}

Result<Finding> run(const Values& point, const Setting&) {
  std::error_code none;
  const auto bin = std::filesystem::read_symlink("/proc/self/exe", none).parent_path() / "xpyd";
  const std::string command = "PATH=$PWD/build/etcd/usr/bin:$PATH tests/netns/run '" + bin.string() +
                              "' --json --rounds " + point["rounds"].dump() + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return Error{ErrorCode::io, command + ": cannot start it"};
  std::string out, last;
  for (std::array<char, 4096> part; size_t n = std::fread(part.data(), 1, part.size(), pipe);)
    out.append(part.data(), n);
  const int status = pclose(pipe);
  Finding found;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("{"))
      found.rows.push_back(Values::parse(line));
    else
      last = line;
  if (status != 0 || found.rows.empty()) return Error{ErrorCode::unavailable, "tests/netns/run: " + last};
  return found;
}

REGISTER_EXPERIMENT("failure_timeline/pool_recovery", "cpu", points, each<run>);

}  // namespace hosts

}  // namespace
}  // namespace xpyd::experiments::failure_timeline_experiment
