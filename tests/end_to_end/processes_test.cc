// Real worker processes under a conductor of this process: they join, are killed, stopped, drained
// and told to change their role while requests run, over every wire that leaves a process (rdma in
// the virtual machine of `make test-rdma`; nccl needs cards). What a client gets is what an
// undisturbed run gives. XPYD_BIN names the program; `make test` sets it.
//
//   make process-chaos SECONDS=120 [WIRE=handoff] [SEED=2] [LEASE=0.5]

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "disagg/process_cluster.h"
#include "disagg/replay.h"
#include "disagg/trace_view.h"
#include "server/metrics.h"
#include "server/stack.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::processes_test {
namespace {

using Words = std::vector<std::string>;
using Tokens = std::vector<int32_t>;

constexpr double kLease = 0.5;     // seconds: where instances fall silent
constexpr double kLongLease = 10;  // where none does: a machine may be busy elsewhere

class Child {
 public:
  Child(Words words, const std::string& log) {
    words.insert(words.begin(), {std::getenv("XPYD_BIN"), "worker"});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 2, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    REQUIRE(posix_spawn(&pid_, argv[0], &files, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&files);
  }
  Child(Child&& other) : pid_(std::exchange(other.pid_, -1)) {}
  ~Child() {
    if (pid_ > 0) end(SIGKILL);
  }
  bool runs() const { return pid_ > 0; }
  void signal(int what) { ::kill(pid_, what); }
  int end(int what) {  // the exit status
    ::kill(pid_, what);
    ::kill(pid_, SIGCONT);
    return wait();
  }
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  pid_t pid_ = -1;
};

// A conductor here and workers elsewhere.
class Bed {
 public:
  // `topology`: whose pool a wire that shares one has.
  explicit Bed(Words more, double lease_s = kLongLease, const char* topology = "1P1D") : more_(std::move(more)) {
    more_.insert(more_.end(), {"--max-model-len", "400", "--max-batch", "8", "--threads", "1"});
    more_.insert(more_.end(), {"--event-log", dir_.path + "/events"});
    if (std::find(more_.begin(), more_.end(), "--kv-bytes") == more_.end())
      more_.insert(more_.end(), {"--kv-bytes", "2MiB"});
    Words words = more_;
    words.insert(words.end(), {"--processes", "--topology", topology});
    options_ = Options::parse(option_table(), "serve", words, 0).value();
    stack_ = prepare_stack(*options_).value();
    ProcessClusterOptions cluster{.conductor = conductor_options(stack_->options),
                                  .listen = "unix:" + dir_.path + "/conductor",
                                  .fingerprint = fingerprint(*stack_)};
    cluster.conductor.lease_s = lease_s;
    // However often a busy machine makes instances look silent.
    cluster.conductor.max_tries = cluster.conductor.max_crashes = 1000;
    cluster.conductor.patience_s = 120;
    cluster.pool = pool_ = make_handoff_pool(stack_->options).value();
    cluster_ = ProcessCluster::create(std::move(cluster), stack_->clock).value();
  }
  ~Bed() {
    if (cluster_) cluster_->stop();
    children_.clear();
  }

  ProcessCluster& cluster() { return *cluster_; }
  Clock& clock() { return stack_->clock; }
  size_t start(const std::string& role, const Words& other = {}) {
    Words words = {"--role", role, "--join", cluster_->address(), "--give-up", "5"};
    for (size_t i = 0; i < more_.size(); i += 2)
      if (more_[i] != "--disagg" && !more_[i].starts_with("--roles") && more_[i] != "--kv-transfer" &&
          more_[i] != "--placement" && std::find(other.begin(), other.end(), more_[i]) == other.end())
        words.insert(words.end(), {more_[i], more_[i + 1]});
    words.insert(words.end(), other.begin(), other.end());
    children_.emplace_back(std::move(words), log(children_.size()));
    return children_.size() - 1;
  }
  Child& child(size_t i) { return children_[i]; }
  std::string log(size_t i) const { return dir_.path + "/worker" + std::to_string(i); }
  const Recorder& recorder() const { return *recorder_; }

  uint64_t ask(int length, int family, int max_tokens, int n = 1) {
    auto request = tiny_request(++last_, prompt_of(length, family), max_tokens);
    request->n = n;
    request->ignore_eos = true;
    request->arrival_s = clock().now();
    // While nobody of a role is there, requests are refused: a client asks again.
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
  // Every request has ended whole, with what one instance alone says.
  void check_answers() {
    REQUIRE(cluster_->wait_idle(240));
    Words words = more_;
    for (size_t i = 0; i < words.size(); i += 2)
      if (words[i] == "--event-log" || words[i] == "--transport" || words[i] == "--disagg" ||
          words[i] == "--kv-transfer" || words[i].starts_with("--decode-") || words[i].starts_with("--roles"))
        words[i] = "";
    Words plain;
    for (size_t i = 0; i < words.size(); i += 2)
      if (!words[i].empty()) plain.insert(plain.end(), {words[i], words[i + 1]});
    plain.insert(plain.end(), {"--topology", "1C"});
    auto alone = build_stack(Options::parse(option_table(), "serve", plain, 0).value()).value();
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
        CHECK(got.tokens == said->choice(known.at({a.length, a.family, a.max_tokens})).tokens);
      }
  }
  // Ends all. The logs of this process and of its workers, whatever became of them, hold decisions that are taken again
  // as they were. Returns how many of each kind.
  std::map<std::string, int64_t> check_logs() {
    cluster_->stop();
    for (Child& child : children_)
      if (child.runs()) child.end(SIGTERM);
    children_.clear();
    cluster_.reset();
    stack_.reset();
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
    const auto lives = read_lives(paths);
    REQUIRE(lives.ok());
    for (const RequestLife& life : lives.value()) decisions["decoding"] += life.decoding > 0;
    decisions["lives"] = int64_t(lives.value().size());
    return decisions;
  }
  // What nobody owns is back within a lease.
  void check_memory() {
    const double until = clock().now() + 20;
    auto held = [&] {
      int sum = 0;
      for (const InstanceStats& s : cluster_->stats().instances)
        sum += s.kv.capacity - s.kv.free - s.kv.cached + s.running + s.waiting;
      return sum;
    };
    while (held() > 0 && clock().now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(held() == 0);
    if (!pool_) return;
    cluster_->clear_prefix_caches();
    const BlockLedger& ledger = pool_->ledger();
    while (ledger.count_free() < ledger.n_blocks() && clock().now() < until + 20)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(ledger.count_free() == ledger.n_blocks());
  }

 private:
  struct Asked {
    int length, family, max_tokens, n;
  };
  TempDir dir_;
  Words more_;
  std::optional<Options> options_;
  std::unique_ptr<Stack> stack_;
  std::shared_ptr<HandoffPool> pool_;
  std::unique_ptr<ProcessCluster> cluster_;
  std::vector<Child> children_;
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  uint64_t last_ = 0;
  std::map<uint64_t, Asked> asked_;
};

// Those that leave a process; rdma and nccl need devices, and so to be named.
std::vector<std::string> wires() {
  if (const char* one = std::getenv("WIRE"); one && *one) return {one};
  std::vector<std::string> names;
  for (const TransportRow& row : transports())
    if (row.leaves_process && row.name != std::string("rdma") && row.name != std::string("nccl"))
      names.push_back(row.name);
  return names;
}

TEST_CASE("processes: every order over every wire gives what one instance gives", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const std::string& wire : wires())
    for (const Words& order : {Words{"--disagg", "prefill_first"}, Words{"--kv-transfer", "pull"},
                               Words{"--disagg", "decode_first"}, Words{"--disagg", "conditional_cost"}}) {
      if (find_transport(wire)->shared_pool && order[1] == "pull") continue;  // refused
      INFO(wire << " " << order[0] << " " << order[1]);
      Words words = {"--transport", wire, "--kv-checksum", "on"};
      words.insert(words.end(), order.begin(), order.end());
      Bed bed(words);
      bed.start("prefill");
      bed.start("decode");
      REQUIRE(bed.cluster().wait_members(2, 60));
      for (int i = 0; i < 10; ++i) bed.ask(1 + 37 * (i % 5), i % 3, 6, 1 + i % 2);
      bed.check_answers();
      bed.check_memory();
      int64_t refused = 0;
      for (const InstanceStats& s : bed.cluster().stats().instances) refused += s.kv_refused;
      CHECK(refused == 0);
      const auto logged = bed.check_logs();
      CHECK(logged.at("files") == 3);
      CHECK(logged.at("place") == 10);
      CHECK(logged.at("order") == 10);
      CHECK(logged.at("plan") > 10);
      CHECK(logged.at("lives") == 10);
      if (order[1] == "prefill_first") CHECK(logged.at("decoding") == 10);
    }
}

TEST_CASE("processes: one pool for all of them, under schemes with and without a block table", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const Words& memory :
       {Words{"--allocator", "token"}, Words{"--allocator", "contiguous", "--kv-bytes", "8MiB"},
        Words{"--kv-layout", "token_major"},
        Words{"--prefill-tp", "2", "--prefill-pp", "2", "--decode-tp", "2", "--decode-pp", "2"}}) {
    INFO(memory[1]);
    Words words = {"--transport", "handoff"};
    words.insert(words.end(), memory.begin(), memory.end());
    Bed bed(words, kLongLease, "1P2D");
    bed.start("prefill");
    bed.start("decode");
    bed.start("decode");
    REQUIRE(bed.cluster().wait_members(3, 60));
    for (int i = 0; i < 30; ++i) bed.ask(1 + 37 * (i % 7), i % 3, 30, 1 + i % 2);
    bed.check_answers();
    bed.check_memory();
    const ServiceStats stats = bed.cluster().stats();
    REQUIRE(stats.process_pool);
    CHECK(stats.process_pool->blocks == stats.process_pool->free);
    const std::string text = Metrics("x", "tiny", 400).render(stats);
    const std::string blocks = std::to_string(stats.process_pool->blocks);
    CHECK(text.find("engine=\"pool\",state=\"free\"} " + blocks + "\n") != text.npos);
    CHECK(text.find("engine=\"P0\",state=\"free\"} 0\n") != text.npos);
    int64_t refused = 0, bytes = 0;
    for (const InstanceStats& s : bed.cluster().stats().instances) refused += s.kv_refused, bytes += s.transfer_bytes;
    CHECK(refused == 0);
    CHECK(bytes == 0);
  }
}

TEST_CASE("processes: a worker with another pool in mind is refused, and says so", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "handoff"});
  const size_t other = bed.start("prefill", {"--kv-bytes", "3MiB"});
  const int status = bed.child(other).wait();
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 2);
  std::ifstream log(bed.log(other));
  const std::string said{std::istreambuf_iterator<char>(log), {}};
  INFO(said);
  CHECK(said.find("--kv-bytes is 3145728 here, 2097152 at the conductor") != std::string::npos);
  bed.start("prefill");
  CHECK(bed.cluster().wait_members(1, 60));
}

TEST_CASE("processes: a prompt goes to the worker whose cache has its prefix", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "tcp", "--placement", "prefix_aware"});
  bed.start("prefill");
  bed.start("prefill");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  const Conductor& conductor = bed.cluster().conductor();
  const auto known = [&](int of) {  // blocks, on one of the two, or on both
    size_t n = 0;
    int at = 0;
    for (const InstanceInfo& info : conductor.members())
      if (info.role == Role::prefill && (of < 0 || at++ == of)) n += conductor.known_blocks(info.id);
    return n;
  };
  // Each prompt leaves 12 full blocks of 16 tokens, which are reported; until both have some.
  const double until = bed.clock().now() + 60;
  int families = 0;
  while (known(0) == 0 || known(1) == 0) {
    REQUIRE(families < 12);
    for (int i = 0; i < 2; ++i) bed.ask(200, families++, 4);
    bed.check_answers();
    while (known(-1) < size_t(12 * families) && bed.clock().now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(known(-1) == size_t(12 * families));
  }
  for (int family = families - 1; family >= 0; --family) {
    const uint64_t id = bed.ask(200, family, 4);
    bed.check_answers();
    CHECK(bed.recorder().choice(id).cached_tokens == 192);
  }
}

TEST_CASE("processes: workers leave, come, and change their role while requests run", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "tcp"});
  bed.start("prefill");
  const size_t second = bed.start("prefill");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.child(second).signal(SIGTERM);  // drains, then ends by itself
  const int status = bed.child(second).wait();
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.start("decode");
  const double until = bed.clock().now() + 60;
  auto names = [&] {
    std::map<char, int> count;
    for (const InstanceInfo& info : bed.cluster().conductor().members()) ++count[info.name[0]];
    return count;
  };
  auto wait_names = [&](int p, int d) {
    while ((names()['P'] != p || names()['D'] != d) && bed.clock().now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(names()['P'] == p);
    CHECK(names()['D'] == d);
  };
  wait_names(1, 2);
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  REQUIRE(bed.cluster().retire("D0", Role::prefill).ok());
  CHECK_FALSE(bed.cluster().retire("D7", Role::prefill).ok());
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.check_answers();
  wait_names(2, 1);
  CHECK(bed.cluster().conductor().totals().failed_attempts == 0);  // nobody was hurt
  bed.ask(100, 1, 10);
  bed.check_answers();
  bed.check_memory();
}

TEST_CASE("processes: a policy changes roles while requests run", "[processes][roles]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "tcp", "--roles", "velocity", "--roles-pressure", "0", "--roles-cool-down", "0"});
  bed.start("prefill");
  bed.start("decode");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  const auto prefills = [&] {
    const std::vector<InstanceInfo> members = bed.cluster().conductor().members();
    return members.size() == 3 ? std::ranges::count(members, Role::prefill, &InstanceInfo::role) : -1;
  };
  const double until = bed.clock().now() + 60;
  // Long prompts, each another one, and short answers: P is short of instances …
  for (int i = 0; prefills() != 2 && bed.clock().now() < until; ++i) {
    bed.ask(300 + i % 60, i, 2);
    bed.cluster().wait_idle(60);
  }
  CHECK(prefills() == 2);
  CHECK(bed.cluster().stats().conductor.role_changes >= 1);
  bed.check_answers();
  bed.check_memory();
}

// A group of pages takes 0.3 s to map here, so that a step takes seconds.
TEST_CASE("processes: a step that takes longer than a lease is nobody's death", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  constexpr double kShortLease = 1.5;  // seconds
  Bed bed({"--transport", "tcp", "--allocator", "vattention", "--page-op-us", "300000", "--kv-map-ahead", "off"},
          kShortLease, "1C");
  bed.start("colocated");
  REQUIRE(bed.cluster().wait_members(1, 60));
  bed.ask(100, 1, 2);
  bed.check_answers();
  const auto waited = [&] { return bed.cluster().stats().instances.at(0).kv.vattention.map_wait_seconds; };
  const double until = bed.clock().now() + 60;
  while (waited() <= kShortLease && bed.clock().now() < until)  // told by the next sign of life
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(waited() > kShortLease);
  const ServiceStats stats = bed.cluster().stats();
  CHECK(stats.conductor.left == 0);
  CHECK(stats.conductor.failed_attempts == 0);
}

TEST_CASE("processes: chaos: workers are killed and stopped under load, and nothing is lost or wrong",
          "[processes][process-chaos]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  const char* seconds = std::getenv("SECONDS_OF_CHAOS");
  const double length = seconds ? std::atof(seconds) : 4;
  const char* patient = std::getenv("LEASE");  // where a machine is emulated, and slow
  const double lease = patient ? std::atof(patient) : kLease;
  Random random(uint64_t(std::getenv("SEED") ? std::atoi(std::getenv("SEED")) : 1));
  for (const std::string& wire : wires()) {
    INFO(wire);
    Bed bed({"--transport", wire, "--kv-checksum", "on"}, lease, "2P2D");
    const char* roles[] = {"prefill", "prefill", "decode", "decode"};
    std::vector<size_t> alive;
    for (const char* role : roles) alive.push_back(bed.start(role));
    REQUIRE(bed.cluster().wait_members(4, 60));
    const double end = bed.clock().now() + length;
    int kills = 0, stops = 0, asked = 0;
    while (bed.clock().now() < end) {
      for (int i = 0; i < 6; ++i, ++asked) bed.ask(20 + 10 * int(random.below(12)), int(random.below(3)), 40);
      const size_t victim = random.below(4);
      if (random.below(2) == 0) {
        bed.child(alive[victim]).end(SIGKILL);
        alive[victim] = bed.start(roles[victim]);
        ++kills;
      } else {  // longer than its lease: it comes back as a zombie
        bed.child(alive[victim]).signal(SIGSTOP);
        std::this_thread::sleep_for(std::chrono::duration<double>(2 * lease * random.uniform()));
        bed.child(alive[victim]).signal(SIGCONT);
        ++stops;
      }
      std::this_thread::sleep_for(std::chrono::duration<double>(0.4 * random.uniform()));
    }
    bed.check_answers();
    bed.check_memory();
    const ConductorStats totals = bed.cluster().conductor().totals();
    std::printf(
        "process chaos over %s: %d requests, %d killed, %d stopped, %d attempts failed, %d choices "
        "placed anew; 0 lost, 0 wrong\n",
        wire.c_str(), asked, kills, stops, int(totals.failed_attempts), int(totals.replaced_choices));
    for (int i = 0; i < kAttemptFailures; ++i)
      if (totals.failed_by[size_t(i)] > 0)
        std::printf("  %d %s\n", int(totals.failed_by[size_t(i)]), failure_name(AttemptFailure(i)));
    const auto logged = bed.check_logs();
    CHECK(logged.at("files") >= 5);  // of all but who was killed before it had one
    CHECK(logged.at("files") <= 5 + kills);
    CHECK(logged.at("place") == totals.attempts);
    CHECK(logged.at("plan") > 0);
    CHECK(logged.at("lives") == asked);
  }
}

}  // namespace
}  // namespace xpyd::testing::processes_test
