// A conductor that ends and starts again, and the worker process that joins it again. XPYD_BIN
// names the program; `make test` sets it.

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "disagg/process_cluster.h"
#include "server/local_workers.h"
#include "server/stack.h"
#include "tests/server/etcd_fixture.h"

namespace xpyd::testing::rejoin_test {
namespace {

const std::vector<std::string> kShape = {"--kv-bytes",  "2MiB", "--max-model-len", "400",
                                         "--max-batch", "8",    "--threads",       "1"};

// A colocated worker; `where` is how it finds its conductor.
struct WorkerProcess {
  pid_t pid = -1;
  WorkerProcess(const char* program, const std::vector<std::string>& where) {
    std::vector<std::string> words = {program, "worker", "--role", "colocated"};
    words.insert(words.end(), where.begin(), where.end());
    words.insert(words.end(), kShape.begin(), kShape.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    REQUIRE(posix_spawn(&pid, program, nullptr, nullptr, argv.data(), environ) == 0);
  }
  ~WorkerProcess() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  bool lives() const { return waitpid(pid, nullptr, WNOHANG) == 0; }
  void leave() {
    kill(pid, SIGTERM);
    int status = -1;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    pid = -1;
    CHECK(WIFEXITED(status));
  }
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
  std::unique_ptr<ProcessCluster> open(const std::string& listen) {
    auto conductor = ProcessCluster::create(
        {.conductor = conductor_options(stack->options), .listen = listen, .fingerprint = fingerprint(*stack)},
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
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make test-etcd` fetches Debian's etcd-server");
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
    registry.value()->announce(kConductorName, last_address);
    CHECK(conductor->wait_members(1, 60));
    registry.value().reset();
    conductor->stop();
    CHECK(worker.lives());  // the same process, both times
  }
  worker.leave();
}

}  // namespace
}  // namespace xpyd::testing::rejoin_test
