// A conductor that dies and starts again elsewhere, and the worker process that finds it through
// etcd. XPYD_BIN names the program; `make test` sets it.

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "disagg/process_cluster.h"
#include "server/etcd_registry.h"
#include "server/options.h"
#include "server/stack.h"
#include "tests/server/etcd_fixture.h"

namespace xpyd::testing {
namespace {

TEST_CASE("a worker outlives its conductor and joins the next by the registry",
          "[end_to_end][etcd]") {
  if (find_etcd().empty()) SKIP_TEST("no etcd: `make test-etcd` fetches Debian's etcd-server");
  const char* program = std::getenv("XPYD_BIN");
  if (!program) SKIP_TEST("XPYD_BIN is not set");
  Etcd etcd;
  const std::vector<std::string> shape = {"--kv-bytes",  "2MiB", "--max-model-len", "400",
                                          "--max-batch", "8",    "--threads",       "1"};
  std::vector<std::string> words = {program,     "worker",     "--role",
                                    "colocated", "--registry", etcd.url()};
  words.insert(words.end(), shape.begin(), shape.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t worker = -1;
  REQUIRE(posix_spawn(&worker, program, nullptr, nullptr, argv.data(), environ) == 0);

  std::vector<std::string> serve = shape;
  serve.push_back("--processes");
  auto options = Options::parse(option_table(), "serve", serve, 0);
  REQUIRE(options.ok());
  auto stack = prepare_stack(options.value());
  REQUIRE(stack.ok());
  std::string last_address;
  for (int round = 0; round < 2; ++round) {
    ProcessClusterOptions cluster{.conductor = conductor_options(stack.value()->options),
                                  .listen = "127.0.0.1:0",
                                  .fingerprint = fingerprint(*stack.value())};
    auto conductor = ProcessCluster::create(std::move(cluster), stack.value()->clock);
    REQUIRE(conductor.ok());
    CHECK(conductor.value()->address() != last_address);
    last_address = conductor.value()->address();
    auto registry = open_etcd(etcd.url(), 2, stack.value()->clock);
    REQUIRE(registry.ok());
    registry.value()->announce(kConductorName, last_address);
    CHECK(conductor.value()->wait_members(1, 60));
    registry.value().reset();
    conductor.value()->stop();
    CHECK(waitpid(worker, nullptr, WNOHANG) == 0);  // the same process, both times
  }
  kill(worker, SIGTERM);
  int status = -1;
  REQUIRE(waitpid(worker, &status, 0) == worker);
  CHECK(WIFEXITED(status));
}

}  // namespace
}  // namespace xpyd::testing
