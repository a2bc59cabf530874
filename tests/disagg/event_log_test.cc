#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/json/json.h"
#include "base/random.h"
#include "disagg/conductor/decisions.h"
#include "tests/disagg/logged.h"

namespace xpyd::testing::event_log_test {

TEST_CASE("decisions: a number that is read from the log equals the one written, to the last bit", "[decisions]") {
  Random random(11);
  for (int trial = 0; trial < 1000; ++trial) {
    const double x = std::exp(100 * random.uniform() - 50);
    JsonText json;
    JsonOut(json).write(x);
    REQUIRE(parse_json(json.take(), "number").value().get<double>() == x);
  }
}

// A member that is added to a view but not to its columns would be lost. It changes the size of the struct.
TEST_CASE("decisions: the columns have every member of the views", "[decisions]") {
  CHECK(sizeof(InstanceView) == 120);
  CHECK(sizeof(ClusterView) == 56);
  CHECK(sizeof(SequenceView) == 32);
  CHECK(sizeof(DecodeView) == 24);
  CHECK(sizeof(DisaggView) == 32);
  CHECK(sizeof(DisaggOptions) == 12);
  CHECK(sizeof(ClusterAdmission) == 112);
  CHECK(sizeof(AdmissionOptions) == 8);
  CHECK(sizeof(BatchView) == 64);
  CHECK(sizeof(BlockUse) == 32);
}

// Decisions of every kind, as a server would log them.
void fill(EventLog& log, int n) {
  Random random(7);
  const model::StepCost cost(model::StepCost::Terms{0.010, 0, 0, 0, 0.001, 1e-6});
  for (int i = 0; i < n; ++i) {
    std::vector<InstanceView> instances(4);
    for (InstanceView& x : instances)
      x = {.role = Role::prefill,
           .queued = int(random.below(9)),
           .queued_tokens = int64_t(random.below(9999)),
           .cached_tokens = int(random.below(1000)),
           .queue_s = random.uniform(),
           .prefill_s = random.uniform(),
           .fetch_s = random.uniform(),
           .fetched_prefill_s = random.uniform()};
    instances.back().role = Role::decode;
    const ClusterView view{.instances = instances, .prompt_tokens = 1000, .random = random.next()};
    for (const char* name : {"mooncake", "random"})
      log.decided(i, "place", name, uint64_t(i), view, PlacementOptions{},
                  find_placement_policy(name)->place(view, {}));
    const DecodeView there[] = {{.joins_s = 90, .context = int64_t(random.below(60000)), .at_longest = 60000}};
    const ClusterAdmission admission{.now_s = 100,
                                     .ttft_s = random.uniform() * 3,
                                     .objectives = {2, 0.05},
                                     .prompt_tokens = 5000,
                                     .max_tokens = 500,
                                     .decoding = there,
                                     .capacity_tokens = 100000,
                                     .cost = &cost,
                                     .mean_s = 20};
    log.decided(i, "admit", "predicted", uint64_t(i), admission, AdmissionOptions{},
                find_admission_policy("predicted")->arrives(admission, {}), "cost", cost.terms());
    const DisaggView order{.tokens = int(random.below(4000)), .prefill_jobs = int(random.below(4))};
    log.decided(i, "order", "conditional_threshold", uint64_t(i), order, DisaggOptions{},
                find_disagg_policy("conditional_threshold")->decide(order, {}));
    const SequenceView sequences[] = {
        {.n_tokens = 500, .n_computed = int(random.below(499)), .n_limit = 600, .n_blocks = 32}};
    const BatchView batch{.running = sequences,
                          .available_blocks = 100,
                          .capacity_blocks = 200,
                          .block_tokens = 16,
                          .max_batch = 8,
                          .step_tokens = 128};
    BatchPlan plan;
    find_batch_policy("chunked")->plan(batch, plan);
    log.decided(i, "plan", "chunked", 0, batch, NoOptions{}, plan);
    const BlockUse blocks[] = {{.last_use = i, .uses = 1 + int64_t(random.below(9)), .position = 3},
                               {.last_use = i + 1, .uses = 1 + int64_t(random.below(9))}};
    log.decided(i, "evict", "lru", 0, std::span<const BlockUse>(blocks), NoOptions{}, 0);
  }
}

TEST_CASE("event log: a replay repeats every decision, and counts those that another policy decides differently",
          "[event_log]") {
  Logged log;
  fill(*log.log, 50);
  log.log->write(R"({"t":3,"e":"step"})");
  log.log.reset();
  auto counts = log.replayed();
  CHECK(counts.size() == 5);
  CHECK(counts.at("place").decisions == 100);
  for (const char* kind : {"plan", "evict"}) CHECK(counts.at(kind).decisions == 50);
  for (const auto& [kind, count] : counts) CHECK(count.differ == 0);
  const double regret = counts.at("place").regret;
  CHECK(regret > 0);
  CHECK(counts.at("place").regret_now == regret);
  counts = log.replayed({{{"place", "mooncake"}}});
  CHECK(counts.at("place").differ > 20);  // of the 50 that are random
  CHECK(counts.at("place").regret == regret);
  CHECK(counts.at("place").regret_now < regret);
  CHECK(int64_t(log.differences.size()) == counts.at("place").differ);
  CHECK(log.replayed({{{"evict", "lfu"}}}).at("evict").differ > 10);
  CHECK(log.try_replay({{{"place", "nobodys"}}}).error().message.find("nobodys") != std::string::npos);
}

TEST_CASE("event log: a changed decision differs in the replay, and a broken line is an error with its number",
          "[event_log]") {
  Logged log;
  fill(*log.log, 3);
  log.log.reset();
  const std::vector<std::string> good = log.lines();
  auto lines = good;
  const size_t at = lines[1].find("\"answer\":{");
  lines[1] = lines[1].substr(0, at) + R"("answer":{"prefill":9,"decode":3,"source":-1}})";
  log.write(lines);
  CHECK(log.try_replay().value().at("place").differ == 1);
  for (auto [n, text, says] :
       {std::tuple{0, R"({"xpyd_event_log":2})", ":1: this is not an event log of version 1"},
        {0, "hello", ":1: "},
        {2, R"({"t":1,"e":"place")", ":3: "},
        {2, R"({"t":1,"e":"place","policy":"nobodys"})", "nobodys"},
        {2, R"({"t":1,"e":"place","policy":"random","view":{"instances":5}})", "array"},
        {2, R"({"e":"plan","policy":"chunked","view":{"running":[{"n_tokens":9}]}})", ":3: block_tokens"}}) {
    lines = good;
    lines[size_t(n)] = text;
    log.write(lines);
    INFO(text);
    REQUIRE_FALSE(log.try_replay().ok());
    CHECK(log.try_replay().error().message.find(says) != std::string::npos);
  }
  const std::string absent = log.path + "x";
  CHECK_FALSE(replay({&absent, 1}, {}, [](auto&, auto&) {}).ok());
}

TEST_CASE("event log: the line that a killed process had begun is left out, and nothing else", "[event_log]") {
  Logged log;
  fill(*log.log, 3);
  log.log.reset();
  std::vector<std::string> lines = log.lines();
  const int64_t plans = log.replayed().at("plan").decisions;
  for (const size_t cut : {size_t(1), lines[7].size() / 2, lines[7].size() - 1}) {
    std::ofstream file(log.path);
    for (size_t i = 0; i < 7; ++i) file << lines[i] << "\n";
    file << lines[7].substr(0, cut);
    file.close();
    int64_t all = 0;
    for (const auto& [kind, count] : log.replayed()) all += count.decisions;
    CHECK(all == 6);
  }
  CHECK(plans == 3);
  // One of several processes was killed before its first line was complete.
  const std::string other = log.path + ".pid7";
  fill(*EventLog::create(other, "{}").value(), 3);
  const std::string both[] = {log.path, other};
  for (const char* begun : {"", "{\"xpyd"}) {
    std::ofstream(log.path) << begun;
    const auto counts = replay(both, {}, [](auto&, auto&) {});
    REQUIRE(counts.ok());
    CHECK(counts.value().at("plan").decisions == 3);
  }
  // A log has its first line from the start, however early its process ends.
  const auto open = EventLog::create(log.path, "{}");
  CHECK(log.try_replay().ok());
}

TEST_CASE("event log: a full disk ends the log, and its writers go on", "[event_log]") {
  Logged log;
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const auto signal = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit low{30000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &low);
  fill(*log.log, 200);
  log.log.reset();
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, signal);
  CHECK(std::filesystem::file_size(log.path) == 30000);
  CHECK(log.replayed().at("place").decisions > 10);  // all but the line that is cut
  const std::string nowhere = log.folder.path + "/none/log";
  CHECK(EventLog::create(nowhere, "{}").error().message.find(nowhere) != std::string::npos);
}

}  // namespace xpyd::testing::event_log_test
