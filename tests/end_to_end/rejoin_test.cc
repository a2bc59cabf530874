// A conductor ends and starts again, or another one takes its place, and the worker process joins it again. `make
// check` runs the tests that need an etcd or wait for leases.

#include <future>
#include <mutex>

#include "disagg/processes/process_cluster.h"
#include "disagg/processes/worker.h"
#include "server/build.h"
#include "server/workers/local_workers.h"
#include "tests/json.h"
#include "tests/program.h"
#include "tests/server/etcd_fixture.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::rejoin_test {

const Words kShape = {"--kv-bytes", "2MiB", "--max-model-len", "400", "--max-batch", "8", "--threads", "1"};

Words with_shape(Words words) {
  words.insert(words.end(), kShape.begin(), kShape.end());
  return words;
}

// A colocated worker. `where` is how it finds its conductor.
struct WorkerProcess : Program {
  explicit WorkerProcess(Words where) : Program(with_shape(as_worker(std::move(where)))) {}
  static Words as_worker(Words where) {
    where.insert(where.begin(), {"worker", "--role", "colocated"});
    return where;
  }
};

// A conductor without workers of its own, one of several that stand for election.
struct ServeProcess : Program {
  ServeProcess(const std::string& registry, const std::string& key, const std::string& bind = "127.0.0.1:0")
      : Program(with_shape({"serve", "--processes", "--topology", "1C", "--start-workers", "off", "--cluster-bind",
                            bind, "--cluster-key-file", key, "--registry", registry, "--port", "0", "--lease", "1"})) {}
  bool serves() const { return has(log(), " on http://127.0.0.1:"); }
  // Asks once a worker is there to answer. A conductor that resumes may still count a worker that has left it.
  json ask(const std::string& prompt) {
    const std::string body = as_text({{"prompt", prompt}, {"max_tokens", 12}, {"temperature", 0}});
    REQUIRE(port() > 0);
    Reply reply;
    CHECK(until(60, [&] { return (reply = post(port(), "/v1/completions", body)).status != 503; }));
    INFO(reply.body);
    REQUIRE(reply.status == 200);
    return parsed(reply.body);
  }
};

// A cluster key in its own file, and a registry.
struct Elections {
  TempDir dir;
  Etcd etcd;
  const std::string key = std::filesystem::absolute(dir.path).string() + "/key";
  Elections() {
    std::ofstream(key) << "a secret of sixteen bytes or more";
    std::filesystem::permissions(key, std::filesystem::perms::owner_read);
  }
};

struct Conductors {
  std::unique_ptr<Build> build;
  Conductors() {
    build = prepare_build(Options::parse(option_table(), "serve", with_shape({"--processes"}), 0).value()).value();
  }
  std::unique_ptr<ProcessCluster> open(const std::string& listen, bool stands_by = false) {
    auto conductor = ProcessCluster::create({.conductor = conductor_options(build->options),
                                             .listen = listen,
                                             .fingerprint = fingerprint(*build),
                                             .stands_by = stands_by},
                                            build->clock);
    REQUIRE(conductor.ok());
    return std::move(conductor).value();
  }
};

TEST_CASE("the next conductor gets the worker with its prefix cache", "[processes]") {
  NEEDS_PROGRAM();
  const auto [option, value] = GENERATE(
      table<const char*, const char*>({{"--allocator", "paged"}, {"--host-kv-bytes", "1MiB"}, {"--prefill-tp", "2"}}));
  INFO(option << " " << value);
  TempDir dir;
  const std::string address = "unix:" + dir.path + "/conductor";
  WorkerProcess worker({"--join", address, option, value});
  Conductors conductors;
  std::vector<int32_t> prompt, answer;
  for (int i = 0; i < 200; ++i) prompt.push_back(5 + i * 7 % 80);
  constexpr size_t kFullBlocks = 12;  // of 16 tokens
  for (int round = 0; round < 3; ++round) {
    INFO("round " << round);
    auto conductor = conductors.open(address);
    REQUIRE(conductor->wait_members(1, 60));
    const InstanceId id = conductor->conductor().members()[0].id;
    // The worker reports its cache to the conductor before the conductor sends any request.
    const auto told = [&] {
      return conductor->conductor().look([&](const auto& c) { return c.board().known_blocks(*c.find(id)); });
    };
    if (round > 0) until(60, [&] { return told() >= kFullBlocks; });
    CHECK(told() == (round > 0 ? kFullBlocks : 0));
    auto recorder = std::make_shared<Recorder>();
    auto request = tiny_request(1, prompt, 4);
    request->ignore_eos = true;
    REQUIRE(conductor->submit(request, recorder).ok());
    REQUIRE(conductor->wait_idle(60));
    CHECK(recorder->choice(1).cached_tokens == (round > 0 ? 192 : 0));
    if (round == 0) answer = recorder->choice(1).tokens;
    CHECK(answer.size() == 4);
    CHECK(recorder->choice(1).tokens == answer);
    conductor->stop();
  }
  CHECK(worker.end(SIGTERM) >= 0);
}

// A worker in this process that finds its conductor by a name that the test controls.
class NamedWorker {
 public:
  explicit NamedWorker(Build& build) {
    WorkerOptions options{.cluster = build.options,
                          .role = Role::colocated,
                          .find_conductor =
                              [this] {
                                std::lock_guard lock(mutex_);
                                ++asked_;
                                return named_;
                              },
                          .fingerprint = fingerprint(build),
                          .retry_s = 0.01};
    worker_ = std::make_unique<Worker>(std::move(options), build.clock);
    thread_ = std::thread([this] { (void)worker_->run(); });
  }
  ~NamedWorker() {
    worker_->stop();
    thread_.join();
  }
  void name(const std::string& address, const std::string& id) {
    std::lock_guard lock(mutex_);
    named_ = {address, id};
  }
  // Waits until it has looked up the name, and acted on it, a few more times.
  bool looked() {
    const auto asked = [this] {
      std::lock_guard lock(mutex_);
      return asked_;
    };
    return until(60, [&, before = asked()] { return asked() >= before + 4; });
  }

 private:
  std::mutex mutex_;
  NamedConductor named_;
  int asked_ = 0;
  std::unique_ptr<Worker> worker_;
  std::thread thread_;
};

TEST_CASE("workers do not join a standby conductor at the address of the one that died", "[processes]") {
  CHECK(NamedConductor::of("unix:/a folder/c conductor.1f").address == "unix:/a folder/c");
  CHECK(NamedConductor::of("unix:/a folder/c conductor.1f").id == "conductor.1f");
  TempDir dir;
  Conductors conductors;
  REQUIRE(open_backend(*conductors.build).ok());
  auto first = conductors.open("unix:" + dir.path + "/first");
  auto second = conductors.open("unix:" + dir.path + "/second");
  auto third = conductors.open("unix:" + dir.path + "/third", true);
  NamedWorker worker(*conductors.build);

  // The registry has the name under an earlier incarnation's id, at the same address.
  for (const char* other : {"conductor.dead", ""}) {
    worker.name(first->address(), other);
    REQUIRE(worker.looked());
    CHECK_FALSE(first->wait_members(1, 0));
  }
  worker.name(first->address(), first->id());
  REQUIRE(first->wait_members(1, 60));

  // Another conductor holds the name: the worker ends what it has begun and joins that one.
  auto recorder = std::make_shared<Recorder>();
  auto request = tiny_request(1, {7, 8, 9, 10}, 300);
  request->ignore_eos = true;
  REQUIRE(first->submit(request, recorder).ok());
  worker.name(second->address(), second->id());
  REQUIRE(second->wait_members(1, 60));
  REQUIRE(first->wait_idle(60));
  CHECK(recorder->choice(1).tokens.size() == 300);
  CHECK(recorder->choice(1).finish == FinishReason::length);

  // An empty registry moves no worker.
  worker.name("", "");
  REQUIRE(worker.looked());
  CHECK(second->wait_members(1, 0));

  // A standby conductor accepts no worker until it is elected, even if the name is its own.
  worker.name(third->address(), third->id());
  REQUIRE(worker.looked());
  CHECK_FALSE(third->wait_members(1, 0));
  third->take_workers(true);
  CHECK(third->wait_members(1, 60));
}

// A model whose step does not end until the test lets it.
class StuckModel final : public Model {
 public:
  struct Gate {
    std::promise<void> begun, open;
  };
  StuckModel(std::unique_ptr<Model> inner, Gate& gate) : inner_(std::move(inner)), gate_(gate) {}
  const ModelConfig& config() const override { return inner_->config(); }
  void begin(const StepInput& step, std::span<const Draw> draws, float* logits) override {
    if (!std::exchange(stuck_, true)) gate_.begun.set_value(), gate_.open.get_future().wait();
    inner_->begin(step, draws, logits);
  }
  bool wait() override { return inner_->wait(); }
  void end(Chosen* chosen) override { inner_->end(chosen); }
  Work work(const StepInput& step) const override { return inner_->work(step); }

 private:
  std::unique_ptr<Model> inner_;
  Gate& gate_;
  bool stuck_ = false;
};

TEST_CASE("a worker whose instance does not end says so and ends its process", "[processes]") {
  TempDir dir;
  Conductors conductors;
  REQUIRE(open_backend(*conductors.build).ok());
  auto conductor = conductors.open("unix:" + dir.path + "/conductor");
  StuckModel::Gate gate;
  int ends = 0;
  WorkerOptions options{.cluster = conductors.build->options,
                        .join = conductor->address(),
                        .fingerprint = fingerprint(*conductors.build),
                        .hung_s = 0.05,
                        .hung = [&] { ++ends, gate.open.set_value(); }};
  options.cluster.make_model = [&](int instance, DeviceQueue& queue) -> Result<std::unique_ptr<Model>> {
    auto model = conductors.build->options.make_model(instance, queue);
    if (!model) return model;
    return std::unique_ptr<Model>(std::make_unique<StuckModel>(std::move(model).value(), gate));
  };
  Worker worker(std::move(options), conductors.build->clock);
  std::thread thread([&] { CHECK(worker.run().ok()); });
  REQUIRE(conductor->wait_members(1, 60));
  REQUIRE(conductor->submit(tiny_request(1, {7, 8, 9, 10}, 3), std::make_shared<Recorder>()).ok());
  gate.begun.get_future().wait();
  worker.stop();
  thread.join();
  CHECK(ends == 1);
}

TEST_CASE("of several conductors one serves, and the next takes over its workers and their caches",
          "[.][slow][kept][etcd]") {
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make check STAGE=etcd` fetches Debian's etcd-server");
  NEEDS_PROGRAM();
  const Elections of;
  WorkerProcess worker({"--registry", of.etcd.url(), "--cluster-key-file", of.key});
  const std::string prompt = "The key of box 17 is amber. The owner of house 3 is Grace. What is the key of box 17?";
  const auto cached = [](const json& reply) {
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  ServeProcess first(of.etcd.url(), of.key);
  const json answer = first.ask(prompt);
  CHECK(cached(answer) == 0);
  ServeProcess second(of.etcd.url(), of.key);
  REQUIRE(second.said("stands by"));
  CHECK_FALSE(second.serves());

  first.end(SIGKILL);
  const json again = second.ask(prompt);
  CHECK_SAME(again["choices"][0]["text"], answer["choices"][0]["text"]);
  CHECK(cached(again) > 0);

  // A conductor that was stopped for longer than its lease has lost its place, and gives way.
  ServeProcess third(of.etcd.url(), of.key);
  REQUIRE(third.said("stands by"));
  CHECK_FALSE(third.serves());
  second.signal(SIGSTOP);
  const json after = third.ask(prompt);
  CHECK_SAME(after["choices"][0]["text"], answer["choices"][0]["text"]);
  CHECK(cached(after) > 0);
  second.signal(SIGCONT);
  CHECK(second.end() == 0);
  CHECK(has(second.log(), "has taken over"));
  CHECK_FALSE(worker.ended());
  CHECK(cached(third.ask(prompt)) > 0);

  // A conductor whose successor is gone when it resumes serves again. It once ended although nothing had taken its
  // place.
  ServeProcess fourth(of.etcd.url(), of.key);
  REQUIRE(fourth.said("stands by"));
  third.signal(SIGSTOP);
  CHECK(cached(fourth.ask(prompt)) > 0);
  fourth.end(SIGKILL);
  std::this_thread::sleep_for(std::chrono::duration<double>(kRegistryTtlSeconds + 2));
  third.signal(SIGCONT);
  CHECK(cached(third.ask(prompt)) > 0);
  CHECK(!has(third.log(), "has taken over"));
  third.end(SIGTERM);
  CHECK(worker.end(SIGTERM) >= 0);
}

}  // namespace xpyd::testing::rejoin_test
