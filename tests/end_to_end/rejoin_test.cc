// A conductor that ends and starts again, or whose place another one takes, and the worker process that joins it again.
// XPYD_BIN names the program; `make test` sets it.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "disagg/process_cluster.h"
#include "disagg/worker.h"
#include "server/local_workers.h"
#include "server/stack.h"
#include "tests/json.h"
#include "tests/server/etcd_fixture.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::rejoin_test {
namespace {

const std::vector<std::string> kShape = {"--kv-bytes",  "2MiB", "--max-model-len", "400",
                                         "--max-batch", "8",    "--threads",       "1"};

struct Process {
  pid_t pid = -1;
  // Where `log` is empty its stderr is this process's.
  Process(std::vector<std::string> words, const std::string& log) {
    words.insert(words.end(), kShape.begin(), kShape.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    if (!log.empty()) posix_spawn_file_actions_addopen(&files, 2, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int spawned = posix_spawn(&pid, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    REQUIRE(spawned == 0);
  }
  ~Process() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  bool lives() const { return waitpid(pid, nullptr, WNOHANG) == 0; }
  int end(int with) {  // its status; `with`: a signal, or 0
    if (with) kill(pid, with);
    int status = -1;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    pid = -1;
    return status;
  }
};

// A colocated worker; `where` is how it finds its conductor.
struct WorkerProcess : Process {
  WorkerProcess(const char* program, std::vector<std::string> words) : Process(as_worker(program, words), "") {}
  static std::vector<std::string> as_worker(const char* program, std::vector<std::string>& words) {
    words.insert(words.begin(), {program, "worker", "--role", "colocated"});
    return words;
  }
  void leave() { CHECK(WIFEXITED(end(SIGTERM))); }
};

// A conductor without workers of its own, one of several that stand for election.
class ServeProcess : public Process {
 public:
  ServeProcess(const char* program, const std::string& registry, const std::string& key, const std::string& log,
               const std::string& bind = "127.0.0.1:0")
      : Process({program, "serve", "--processes", "--topology", "1C", "--start-workers", "off", "--cluster-bind", bind,
                 "--cluster-key-file", key, "--registry", registry, "--port", "0", "--lease", "1"},
                log),
        log_(log) {}
  std::string said() const {
    std::ostringstream text;
    text << std::ifstream(log_).rdbuf();
    return text.str();
  }
  void wait_said(const std::string& words) const {
    for (int i = 0; i < 600 && said().find(words) == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    INFO(said());
    REQUIRE(said().find(words) != std::string::npos);
  }
  bool serves() const { return said().find(kPort) != std::string::npos; }
  int port() const {
    wait_said(kPort);
    const std::string text = said();
    return std::atoi(text.c_str() + text.find(kPort) + std::string(kPort).size());
  }
  // Once somebody is there to answer. A conductor that wakes up may count a worker for a moment that has left it.
  json ask(const std::string& prompt) const {
    const std::string request = request_text("POST", "/v1/completions",
                                             as_text({{"prompt", prompt}, {"max_tokens", 12}, {"temperature", 0}}));
    const auto call = [&] {
      Client client(port());
      client.send(request);
      return client.read();
    };
    Reply reply = call();
    for (int i = 0; i < 600 && reply.status == 503; ++i, reply = call())
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    INFO(reply.body);
    REQUIRE(reply.status == 200);
    return parsed(reply.body);
  }

 private:
  static constexpr const char* kPort = "on http://127.0.0.1:";
  const std::string log_;
};

struct Conductors {
  std::unique_ptr<Stack> stack;
  Conductors() {
    std::vector<std::string> serve = kShape;
    serve.push_back("--processes");
    auto options = Options::parse(option_table(), "serve", serve, 0);
    REQUIRE(options.ok());
    auto prepared = prepare_stack(options.value());
    REQUIRE(prepared.ok());
    stack = std::move(prepared).value();
  }
  std::unique_ptr<ProcessCluster> open(const std::string& listen, bool stands_by = false) {
    auto conductor = ProcessCluster::create({.conductor = conductor_options(stack->options),
                                             .listen = listen,
                                             .fingerprint = fingerprint(*stack),
                                             .stands_by = stands_by},
                                            stack->clock);
    REQUIRE(conductor.ok());
    return std::move(conductor).value();
  }
};

TEST_CASE("a worker waits for its conductor, and joins the next one at the same address", "[end_to_end][processes]") {
  const char* program = std::getenv("XPYD_BIN");
  if (!program) SKIP_TEST("XPYD_BIN is not set");
  TempDir dir;
  const std::string address = "unix:" + dir.path + "/conductor";
  WorkerProcess worker(program, {"--join", address});
  Conductors conductors;
  for (int round = 0; round < 2; ++round) {
    auto conductor = conductors.open(address);
    CHECK(conductor->wait_members(1, 60));
    conductor->stop();
    CHECK(worker.lives());
  }
  worker.leave();
}

TEST_CASE("a worker outlives its conductor and joins the next by the registry", "[end_to_end][etcd]") {
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make check STAGE=etcd` fetches Debian's etcd-server");
  const char* program = std::getenv("XPYD_BIN");
  if (!program) SKIP_TEST("XPYD_BIN is not set");
  Etcd etcd;
  WorkerProcess worker(program, {"--registry", etcd.url()});
  Conductors conductors;
  std::string last_address;
  for (int round = 0; round < 2; ++round) {
    auto conductor = conductors.open("127.0.0.1:0");
    CHECK(conductor->address() != last_address);
    last_address = conductor->address();
    auto registry = open_etcd(etcd.url(), 2, conductors.stack->clock);
    REQUIRE(registry.ok());
    registry.value()->announce(kConductorName, NamedConductor{last_address, conductor->id()}.value());
    CHECK(conductor->wait_members(1, 60));
    registry.value().reset();
    conductor->stop();
    CHECK(worker.lives());  // the same process, both times
  }
  worker.leave();
}

TEST_CASE("the next conductor's worker had lost its prefix cache", "[end_to_end][processes]") {
  const char* program = std::getenv("XPYD_BIN");
  if (!program) SKIP_TEST("XPYD_BIN is not set");
  const auto [option, value] = GENERATE(
      table<const char*, const char*>({{"--allocator", "paged"}, {"--host-kv-bytes", "1MiB"}, {"--prefill-tp", "2"}}));
  INFO(option << " " << value);
  TempDir dir;
  const std::string address = "unix:" + dir.path + "/conductor";
  WorkerProcess worker(program, {"--join", address, option, value});
  Conductors conductors;
  std::vector<int32_t> prompt, answer;
  for (int i = 0; i < 200; ++i) prompt.push_back(5 + i * 7 % 80);
  constexpr size_t kFullBlocks = 12;  // of 16 tokens
  for (int round = 0; round < 3; ++round) {
    INFO("round " << round);
    auto conductor = conductors.open(address);
    REQUIRE(conductor->wait_members(1, 60));
    const InstanceId id = conductor->conductor().members()[0].id;
    // The conductor is told of the cache before it asks for anything.
    const auto told = [&] { return conductor->conductor().known_blocks(id); };
    for (int i = 0; round > 0 && i < 600 && told() < kFullBlocks; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
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
  worker.leave();
}

// A worker of this process that finds its conductor by a name which the test holds.
class NamedWorker {
 public:
  NamedWorker(Stack& stack, const std::string& listen) {
    WorkerOptions options{.cluster = stack.options,
                          .role = Role::colocated,
                          .find_conductor =
                              [this] {
                                std::lock_guard lock(mutex_);
                                return named_;
                              },
                          .listen = listen,
                          .fingerprint = fingerprint(stack),
                          .retry_s = 0.01};
    worker_ = std::make_unique<Worker>(std::move(options), stack.clock);
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

 private:
  std::mutex mutex_;
  NamedConductor named_;
  std::unique_ptr<Worker> worker_;
  std::thread thread_;
};

TEST_CASE("workers joined a conductor that stood by at the address of the one that had died",
          "[end_to_end][processes]") {
  CHECK(NamedConductor::of("unix:/a folder/c conductor.1f").address == "unix:/a folder/c");
  CHECK(NamedConductor::of("unix:/a folder/c conductor.1f").id == "conductor.1f");
  TempDir dir;
  Conductors conductors;
  REQUIRE(open_backend(*conductors.stack).ok());
  auto first = conductors.open("unix:" + dir.path + "/first");
  auto second = conductors.open("unix:" + dir.path + "/second");
  auto third = conductors.open("unix:" + dir.path + "/third", true);
  NamedWorker worker(*conductors.stack, "unix:" + dir.path + "/peer");

  // The registry has the name under the lease of the incarnation before, at the same address.
  worker.name(first->address(), "conductor.dead");
  CHECK_FALSE(first->wait_members(1, 1));
  worker.name(first->address(), "");
  CHECK_FALSE(first->wait_members(1, 0.5));
  worker.name(first->address(), first->id());
  REQUIRE(first->wait_members(1, 60));

  // Another one holds the name: the worker ends what it has begun, and goes there.
  auto recorder = std::make_shared<Recorder>();
  auto request = tiny_request(1, {7, 8, 9, 10}, 300);
  request->ignore_eos = true;
  REQUIRE(first->submit(request, recorder).ok());
  worker.name(second->address(), second->id());
  REQUIRE(second->wait_members(1, 60));
  REQUIRE(first->wait_idle(60));
  CHECK(recorder->choice(1).tokens.size() == 300);
  CHECK(recorder->choice(1).finish == FinishReason::length);

  // A registry that says nothing moves nobody.
  worker.name("", "");
  std::this_thread::sleep_for(std::chrono::milliseconds(800));
  CHECK(second->wait_members(1, 0));

  // Whoever stands by takes nobody, even where the name says so, until it is elected.
  worker.name(third->address(), third->id());
  CHECK_FALSE(third->wait_members(1, 2));
  third->take_workers(true);
  CHECK(third->wait_members(1, 60));
}

TEST_CASE("a conductor that died and started again at its address within its lease had the workers, and stood by",
          "[end_to_end][etcd]") {
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make check STAGE=etcd` fetches Debian's etcd-server");
  const char* program = std::getenv("XPYD_BIN");
  if (!program) SKIP_TEST("XPYD_BIN is not set");
  TempDir dir;
  Etcd etcd;
  const std::string key = dir.path + "/key", bind = "127.0.0.1:" + std::to_string(free_port());
  std::ofstream(key) << "a secret of sixteen bytes or more";
  std::filesystem::permissions(key, std::filesystem::perms::owner_read);
  WorkerProcess worker(program, {"--registry", etcd.url(), "--cluster-key-file", key});
  ServeProcess first(program, etcd.url(), key, dir.path + "/first", bind);
  first.ask("one");
  ServeProcess second(program, etcd.url(), key, dir.path + "/second");
  second.wait_said("stands by");
  first.end(SIGKILL);
  ServeProcess again(program, etcd.url(), key, dir.path + "/again", bind);
  for (int i = 0; i < 600 && !second.serves() && !again.serves(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const ServeProcess& elected = second.serves() ? second : again;
  elected.ask("two");  // within its patience
  CHECK(second.serves() + again.serves() == 1);
}

TEST_CASE("of several conductors one serves, and the next takes its place with its workers and their caches",
          "[end_to_end][etcd]") {
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make check STAGE=etcd` fetches Debian's etcd-server");
  const char* program = std::getenv("XPYD_BIN");
  if (!program) SKIP_TEST("XPYD_BIN is not set");
  TempDir dir;
  Etcd etcd;
  const std::string key = dir.path + "/key";
  std::ofstream(key) << "a secret of sixteen bytes or more";
  std::filesystem::permissions(key, std::filesystem::perms::owner_read);
  WorkerProcess worker(program, {"--registry", etcd.url(), "--cluster-key-file", key});
  const std::string prompt = "The key of box 17 is amber. The owner of house 3 is Grace. What is the key of box 17?";
  const auto cached = [](const json& reply) {
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  ServeProcess first(program, etcd.url(), key, dir.path + "/first");
  const json answer = first.ask(prompt);
  CHECK(cached(answer) == 0);
  ServeProcess second(program, etcd.url(), key, dir.path + "/second");
  second.wait_said("stands by");
  CHECK_FALSE(second.serves());

  first.end(SIGKILL);
  const json again = second.ask(prompt);
  CHECK_SAME(again["choices"][0]["text"], answer["choices"][0]["text"]);
  CHECK(cached(again) > 0);

  // One that has been away for longer than its lease: its place is taken, and it gives way.
  ServeProcess third(program, etcd.url(), key, dir.path + "/third");
  third.wait_said("stands by");
  CHECK_FALSE(third.serves());
  kill(second.pid, SIGSTOP);
  const json after = third.ask(prompt);
  CHECK_SAME(after["choices"][0]["text"], answer["choices"][0]["text"]);
  CHECK(cached(after) > 0);
  kill(second.pid, SIGCONT);
  CHECK(second.end(0) == 0);
  CHECK(second.said().find("has taken its place") != std::string::npos);
  CHECK(worker.lives());
  CHECK(cached(third.ask(prompt)) > 0);

  // One that is told to end while it stands by.
  ServeProcess fourth(program, etcd.url(), key, dir.path + "/fourth");
  fourth.wait_said("stands by");
  CHECK(WEXITSTATUS(fourth.end(SIGTERM)) == 128 + SIGTERM);

  // One whose successor was gone when it woke up: it ended for somebody who was not there.
  ServeProcess fifth(program, etcd.url(), key, dir.path + "/fifth");
  fifth.wait_said("stands by");
  kill(third.pid, SIGSTOP);
  CHECK(cached(fifth.ask(prompt)) > 0);
  fifth.end(SIGKILL);
  std::this_thread::sleep_for(std::chrono::duration<double>(kRegistryTtlSeconds + 2));
  kill(third.pid, SIGCONT);
  CHECK(cached(third.ask(prompt)) > 0);
  CHECK(third.said().find("has taken its place") == std::string::npos);
  third.end(SIGTERM);
  worker.leave();
}

}  // namespace
}  // namespace xpyd::testing::rejoin_test
