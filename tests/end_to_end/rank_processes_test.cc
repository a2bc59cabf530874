// Pipeline stages of an instance in separate processes. They have the bits of one process, whatever transports
// activations and however many waves are under way. The death of a stage ends its instance and no request.

#include "disagg/chunked_pp/remote_pipeline.h"
#include "disagg/chunked_pp/stage.h"
#include "disagg/processes/registry.h"
#include "model/folder.h"
#include "server/workers/local_workers.h"
#include "tests/process_bed.h"
#include "tests/server/etcd_fixture.h"

namespace xpyd::testing::rank_processes_test {

// In the order of stages.
std::vector<pid_t> stages_of(pid_t head) {
  const std::set<pid_t> all = children_of(head);
  return {all.begin(), all.end()};
}

bool runs(pid_t pid) {
  const std::string stat = read_all("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end != stat.npos && stat[name_end + 2] != 'Z';
}

TEST_CASE("ranks: stages in separate processes have the bits of one process", "[processes][rank-processes]") {
  NEEDS_PROGRAM();
  struct Case {
    const char *pp, *tp, *window, *transport, *topology;
  };
  for (const Case& c :
       {Case{"2", "1", "1", "tcp", "1C"}, Case{"4", "1", "4", "shm", "1C"}, Case{"4", "2", "0", "tcp", "1C"},
        Case{"2", "1", "0", "tcp", "1P1D"}, Case{"2", "2", "2", "shm", "1P1D"}}) {
    INFO(c.topology << " pp " << c.pp << " tp " << c.tp << " window " << c.window << " over " << c.transport);
    const bool split = c.topology == std::string("1P1D");
    Words words = {"--ranks",           "processes", "--prefill-pp", c.pp,        "--prefill-tp",   c.tp,
                   "--pipeline-window", c.window,    "--transport",  c.transport, "--chunk-tokens", "48"};
    if (split) words.insert(words.end(), {"--decode-pp", "2"});
    Bed bed(words, kLongLease, c.topology);
    const size_t first = bed.start(split ? "prefill" : "colocated");
    if (split) bed.start("decode");
    REQUIRE(bed.cluster().wait_members(split ? 2 : 1, 60));
    CHECK(stages_of(bed.child(first).pid).size() == size_t(std::stoi(c.pp)));
    for (int i = 0; i < 12; ++i) bed.ask(1 + 37 * (i % 6), i % 3, 12, 1 + i % 2);
    bed.check_answers();
    bed.check_memory();
    CHECK(bed.cluster().conductor().stats().conductor.failed_attempts == 0);
  }
}

TEST_CASE("ranks: a killed stage ends its instance and loses no request", "[processes][rank-processes]") {
  NEEDS_PROGRAM();
  Bed bed({"--ranks", "processes", "--prefill-pp", "2", "--decode-pp", "2", "--transport", "shm"});
  const size_t heads[] = {bed.start("prefill"), bed.start("decode")};
  REQUIRE(bed.cluster().wait_members(2, 60));
  int lives = 2;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 8; ++i) bed.ask(60 + 20 * i, i % 3, 40);
    const pid_t head = bed.child(heads[round % 2]).pid;
    std::vector<pid_t> stages;
    REQUIRE(until(60, [&] { return (stages = stages_of(head)).size() == 2; }));
    ::kill(stages[size_t(round)], SIGKILL);
    // The head lives on, and joins again with two new stages.
    CHECK(until(60, [&] {
      const std::vector<pid_t> now = stages_of(head);
      return now.size() == 2 && now[0] != stages[0] && now[1] != stages[1];
    }));
    CHECK_FALSE(runs(stages[0]));
    CHECK_FALSE(runs(stages[1]));
    ++lives;
    REQUIRE(until(60, [&] { return bed.cluster().conductor().members().size() == 2; }));
  }
  bed.check_answers();
  bed.check_memory();
  CHECK(bed.cluster().stats().conductor.left == lives - 2);
}

// The head does not map the stages' memory, so the stages themselves copy blocks and send KV.
TEST_CASE("ranks: remote stages join their head, and restarted ones join again", "[processes][rank-processes]") {
  NEEDS_PROGRAM();
  for (const auto& [topology, grain, tp] :
       {std::tuple{"1C", "layer", "1"}, std::tuple{"1P1D", "layer", "2"}, std::tuple{"1P1D", "request", "1"}}) {
    INFO(topology << " by " << grain << " tp " << tp);
    Bed bed(
        {"--transport", "tcp", "--prefill-pp", "2", "--prefill-tp", tp, "--stream-kv", grain, "--chunk-tokens", "48"},
        kLongLease, topology);
    const bool split = topology == std::string("1P1D");
    const std::string ranks = "unix:" + bed.folder() + "/ranks";
    bed.start(split ? "prefill" : "colocated", {"--ranks", "remote", "--rank-bind", ranks});
    size_t stages[] = {bed.start_stage(0, ranks), bed.start_stage(1, ranks)};
    if (split) bed.start("decode");
    REQUIRE(bed.cluster().wait_members(split ? 2 : 1, 60));
    for (int i = 0; i < 24; ++i) bed.ask(1 + 37 * (i % 6), i % 2, 12, 1 + i % 3);
    bed.check_answers();
    CHECK(bed.cluster().conductor().stats().conductor.failed_attempts == 0);
    // The next heartbeat reports it.
    if (split) CHECK(until(60, [&] { return bed.sum(&InstanceStats::transfer_bytes) > 0; }));
    CHECK(bed.sum(&InstanceStats::kv_refused) == 0);
    // A killed stage that is started again joins again, and so does the stage that was left.
    for (int stage = 0; stage < 2; ++stage) {
      for (int i = 0; i < 8; ++i) bed.ask(60 + 20 * i, i % 3, 40);
      bed.child(stages[stage]).end(SIGKILL);
      stages[stage] = bed.start_stage(stage, ranks);
      bed.check_answers();
    }
    CHECK(bed.cluster().stats().conductor.left == 2);
    bed.check_memory();
  }
}

TEST_CASE("ranks: stages find their instance through the registry, wherever it listens now",
          "[.][slow][rank-processes][etcd]") {
  NEEDS_PROGRAM();
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make check STAGE=etcd` fetches Debian's etcd-server");
  Etcd etcd;
  TempDir dir;
  const std::string key = dir.path + "/key";
  std::ofstream(key) << "a key of this test alone";
  std::filesystem::permissions(key, std::filesystem::perms::owner_read);
  Bed bed({"--transport", "tcp", "--prefill-pp", "2", "--cluster-key-file", key}, kLongLease, "1C");
  auto registry = open_etcd(etcd.url(), 2, bed.clock()).value();
  registry->announce(kConductorName, NamedConductor{bed.cluster().address(), bed.cluster().id()}.value());
  const auto start = [&](Words words) {
    words.insert(words.end(), {"--registry", etcd.url(), "--rank-group", "a", "--give-up", "60"});
    return bed.start_worker(words);
  };
  const auto start_head = [&] {
    return start({"--role", "colocated", "--ranks", "remote", "--rank-bind", "127.0.0.1:0"});
  };
  size_t head = start_head(), stages[] = {start({"--rank", "0"}), start({"--rank", "1"})};
  for (int life = 1; life <= 3; ++life) {
    REQUIRE(bed.cluster().wait_members(1, 60));
    for (int i = 0; i < 6; ++i) bed.ask(1 + 37 * (i % 6), i % 2, 12);
    bed.check_answers();
    if (life == 1) {
      bed.child(stages[1]).end(SIGKILL);
      stages[1] = start({"--rank", "1"});
    } else if (life == 2) {
      bed.child(head).end(SIGKILL);
      head = start_head();
    }
    REQUIRE(until(60, [&] { return life == 3 || bed.cluster().stats().conductor.left == life; }));
  }
  bed.check_memory();
}

TEST_CASE("ranks: a stage without a registration for each place is refused", "[rank-processes]") {
  using namespace disagg::ranks;
  RealClock clock;
  ControlLoop of_stage(clock);
  HeadOptions head{.far = true, .step_tokens = 1, .max_logits = 1, .transport = find_transport("tcp")};
  head.transport_host = "127.0.0.1";
  head.config.vocab = 8;
  head.given_up = [&, until = clock.now() + 20] { return clock.now() > until; };
  head.start = [&](const std::string& address, int) -> Result<std::unique_ptr<Processes>> {
    const NodeIdentity self{"stage1"};
    const ChannelPtr stage = need(
        of_stage.connect({address, {}, self}, 5, [](const ChannelPtr&) { return ChannelEvents(); }));
    say_to(stage, Connected{{RemoteKey{}}});
    return std::unique_ptr<Processes>();
  };
  const KvLayout whole{{.n_layers = 2, .n_kv_heads = 1, .head_dim = 8}, KvOrder::layer_major, 16, 4};
  const auto made = RemotePipeline::make(std::move(head), {whole, {}, {.n_layers = 2, .n_kv_heads = 1, .pp = 2}},
                                         clock);
  REQUIRE_FALSE(made.ok());
  INFO(made.error().message);
  CHECK(has(made.error().message, "registrations: expected one for each of 4 places"));
}

TEST_CASE("ranks: a stage that cannot start reports why, and ends its head", "[processes][rank-processes]") {
  NEEDS_PROGRAM();
  Bed bed({"--ranks", "processes", "--prefill-pp", "2"}, kLongLease, "1C");
  TempDir dir;  // a model without weights, which only the stages read
  const std::string model = dir.path + "/xpyd-demo";
  REQUIRE(export_demo(model).ok());
  std::filesystem::remove(model + "/model.safetensors");
  const size_t head = bed.start("colocated", {model});
  CHECK(bed.child(head).end() == 2);
  const std::string said = bed.child(head).log();
  INFO(said);
  CHECK(has(said, model));
  CHECK(has(said, "safetensors"));
}

}  // namespace xpyd::testing::rank_processes_test
