// A conductor in the test's process, and workers that are processes. XPYD_BIN names the program.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <thread>

#include "disagg/processes/process_cluster.h"
#include "experiments/event_log/replay.h"
#include "experiments/event_log/trace_view.h"
#include "server/build.h"
#include "tests/program.h"
#include "tests/tiny_model.h"

namespace xpyd::testing {

using Tokens = std::vector<int32_t>;

inline constexpr double kLease = 0.5;     // seconds, for tests in which instances fall silent
inline constexpr double kLongLease = 10;  // for tests in which none does, on a machine that may be busy elsewhere

// A conductor in this process, and workers in others.
class Bed {
 public:
  explicit Bed(Words more, double lease_s = kLongLease, const char* topology = "1P1D") : more_(std::move(more)) {
    more_.insert(more_.end(), {"--max-model-len", "400", "--max-batch", "8", "--threads", "1"});
    more_.insert(more_.end(), {"--event-log", dir_.path + "/events"});
    if (std::find(more_.begin(), more_.end(), "--kv-bytes") == more_.end())
      more_.insert(more_.end(), {"--kv-bytes", "2MiB"});
    Words words = more_;
    words.insert(words.end(), {"--processes", "--topology", topology});
    options_ = Options::parse(option_table(), "serve", words, 0).value();
    build_ = prepare_build(*options_).value();
    ProcessClusterOptions cluster{.conductor = conductor_options(build_->options),
                                  .listen = "unix:" + dir_.path + "/conductor",
                                  .fingerprint = fingerprint(*build_)};
    if (const std::string& file = options_->text("cluster-key-file"); !file.empty())
      cluster.key = ClusterKey::from_file(file).value();
    cluster.conductor.lease_s = lease_s;
    // A busy machine may make instances look silent any number of times.
    cluster.conductor.max_tries = 1000;
    cluster.conductor.patience_s = 120;
    cluster_ = ProcessCluster::create(std::move(cluster), build_->clock).value();
  }
  ~Bed() {
    if (cluster_) cluster_->stop();
    children_.clear();
  }

  ProcessCluster& cluster() { return *cluster_; }
  Clock& clock() { return build_->clock; }
  size_t start(const std::string& role, const Words& other = {}) {
    return start_worker({"--role", role, "--join", cluster_->address(), "--give-up", "60"}, other);
  }
  // Starts a stage of the instance whose head listens at `head`.
  size_t start_stage(int stage, const std::string& head) {
    return start_worker({"--rank", std::to_string(stage), "--join", head, "--give-up", "60"});
  }
  size_t start_worker(Words words, const Words& other = {}) {
    for (size_t i = 0; i < more_.size(); i += 2)
      if (more_[i] != "--disagg" && more_[i] != "--kv-transfer" && more_[i] != "--placement" &&
          more_[i] != "--kv-fetch" && more_[i] != "--decode-copies" &&
          std::find(other.begin(), other.end(), more_[i]) == other.end())
        words.insert(words.end(), {more_[i], more_[i + 1]});
    words.insert(words.end(), other.begin(), other.end());
    words.insert(words.begin(), "worker");
    // All processes of a cluster have one TMPDIR.
    const Program::How how = {.environment = {{"TMPDIR", std::filesystem::temp_directory_path().string()}}};
    children_.push_back(std::make_unique<Program>(std::move(words), how));
    return children_.size() - 1;
  }
  Program& child(size_t i) { return *children_[i]; }
  std::string folder() const { return dir_.path; }
  // A member of this cluster at an address.
  ControlEndpoint endpoint(const std::string& address, const char* id) const {
    return {address, {}, {id, fingerprint(*build_)}};
  }

  uint64_t ask(int length, int family, int max_tokens, int n = 1) {
    auto request = tiny_request(++last_, prompt_of(length, family), max_tokens);
    request->n = n;
    request->ignore_eos = true;
    request->arrival_s = clock().now();
    // While no instance of a role is there, requests are refused, and a client asks again.
    Status taken = cluster_->submit(request, recorder_);
    for (const double until = clock().now() + 60; !taken && clock().now() < until;) {
      REQUIRE(taken.error().code == ErrorCode::unavailable);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      taken = cluster_->submit(request, recorder_);
    }
    REQUIRE(taken.ok());
    asked_[last_] = {length, family, max_tokens, n};
    return last_;
  }
  static Tokens prompt_of(int length, int family) {
    Tokens prompt;
    for (int i = 0; i < length; ++i) prompt.push_back(5 + (i * 7 + family * 13) % 80);
    return prompt;
  }
  // Every request has ended whole, with the tokens of one instance alone.
  void check_answers() {
    REQUIRE(cluster_->wait_idle(240));
    Words words = more_;
    for (size_t i = 0; i < words.size(); i += 2)
      if (words[i] == "--event-log" || words[i] == "--transport" || words[i] == "--disagg" ||
          words[i] == "--kv-transfer" || words[i].starts_with("--decode-") || words[i] == "--ranks")
        words[i] = "";
    Words plain;
    for (size_t i = 0; i < words.size(); i += 2)
      if (!words[i].empty()) plain.insert(plain.end(), {words[i], words[i + 1]});
    plain.insert(plain.end(), {"--topology", "1C"});
    auto alone = make_build(Options::parse(option_table(), "serve", plain, 0).value()).value();
    auto said = std::make_shared<Recorder>();
    std::map<std::array<int, 3>, uint64_t> known;
    for (const auto& [id, a] : asked_) {
      if (!known.try_emplace({a.length, a.family, a.max_tokens}, id).second) continue;
      auto request = tiny_request(id, prompt_of(a.length, a.family), a.max_tokens);
      request->ignore_eos = true;
      REQUIRE(alone->runtime->submit(request, said).ok());
    }
    while (!alone->runtime->wait_idle(0)) alone->cluster->turn();
    for (const auto& [id, a] : asked_)
      for (int c = 0; c < a.n; ++c) {
        const Recorder::Choice got = recorder_->choice(id, c);
        INFO("request " << id << " choice " << c << ": " << got.error);
        CHECK(got.ends == 1);
        CHECK(got.finish == FinishReason::length);
        const Recorder::Choice wanted = said->choice(known.at({a.length, a.family, a.max_tokens}));
        CHECK(got.tokens == wanted.tokens);
        CHECK(got.logits_hash == wanted.logits_hash);
      }
  }
  int64_t sum(int64_t InstanceStats::*figure) const {  // of all instances
    int64_t total = 0;
    for (const InstanceStats& s : cluster_->stats().instances) total += s.*figure;
    return total;
  }
  // Ends all processes. The logs of this process and of its workers, whatever became of them, replay to the same
  // decisions. Returns the number of decisions of each kind.
  std::map<std::string, int64_t> check_logs() {
    cluster_->stop();
    for (const auto& child : children_)
      if (child->pid > 0) child->end(SIGTERM);
    children_.clear();
    cluster_.reset();
    build_.reset();
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(dir_.path))
      if (entry.path().filename().string().starts_with("events")) paths.push_back(entry.path().string());
    int told = 0;
    const auto counts = replay(paths, {}, [&told](const std::string& line, const std::string& now) {
      UNSCOPED_INFO(line << "\nnow " << now);
      CHECK(++told == 0);
    });
    INFO((counts ? "" : counts.error().message));
    REQUIRE(counts.ok());
    std::map<std::string, int64_t> decisions{{"files", int64_t(paths.size())}};
    for (const auto& [kind, count] : counts.value()) decisions[kind] = count.decisions;
    const auto traces = read_traces(paths);
    REQUIRE(traces.ok());
    for (const RequestTrace& trace : traces.value()) decisions["decoding"] += trace.decoding > 0;
    decisions["traces"] = int64_t(traces.value().size());
    return decisions;
  }
  // Memory that nobody owns is free within a lease.
  void check_memory() {
    const double until = clock().now() + 60;
    auto held = [&] {
      int sum = 0;
      for (const InstanceStats& s : cluster_->stats().instances)
        sum += s.kv.capacity - s.kv.free - s.kv.cached + s.running + s.waiting;
      return sum;
    };
    while (held() > 0 && clock().now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(held() == 0);
  }

 private:
  struct Asked {
    int length, family, max_tokens, n;
  };
  TempDir dir_;
  Words more_;
  std::optional<Options> options_;
  std::unique_ptr<Build> build_;
  std::unique_ptr<ProcessCluster> cluster_;
  std::vector<std::unique_ptr<Program>> children_;
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  uint64_t last_ = 0;
  std::map<uint64_t, Asked> asked_;
};

}  // namespace xpyd::testing
