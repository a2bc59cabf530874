// What a second hard look found where several mends met.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/private_folder.h"
#include "disagg/control/channel.h"
#include "server/limits.h"
#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing {
namespace {

// No descriptor more can be opened while this lives.
struct NoDescriptors {
  rlimit before{};
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before);
    rlimit none = before;
    none.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before); }
};

// Exit code, and what it said.
std::pair<int, std::string> run_without_memory(std::vector<std::string> words, const char* at) {
  char log[] = "/tmp/xpyd-attack-XXXXXX";
  const int fd = mkstemp(log);
  REQUIRE(fd >= 0);
  const std::string name = words[0];
  words.insert(words.begin(), std::getenv("XPYD_BIN"));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(fd, 2);
    dup2(open("/dev/null", O_WRONLY), 1);
    setenv("LD_PRELOAD", std::filesystem::absolute(std::getenv("XPYD_FAULTS")).c_str(), 1);
    setenv("FAULT_IN", name.c_str(), 1);
    setenv("FAULT_KIND", "alloc", 1);
    setenv("FAULT_AT", at, 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  close(fd);
  std::stringstream text;
  text << std::ifstream(log).rdbuf();
  unlink(log);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text.str()};
}

}  // namespace

TEST_CASE("issue: without memory at its start a server ended as if told to, by exit code 143",
          "[command_line][attack]") {
  if (!std::getenv("XPYD_BIN") || !std::getenv("XPYD_FAULTS"))
    SKIP_TEST("XPYD_BIN or XPYD_FAULTS is not set: make test sets them");
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"serve", "--port", "0"},
           {"serve", "--port", "0", "--processes"},
           {"worker", "--role", "decode", "--join", "127.0.0.1:1"},
           {"generate", "--prompt", "x"}})
    for (const char* at : {"2500", "3000"}) {
      std::vector<std::string> all = words;
      all.insert(all.end(), {"--kv-bytes", "2MiB", "--threads", "1"});
      const auto [code, said] = run_without_memory(all, at);
      INFO(words[0] << ", allocation " << at << ": " << said);
      CHECK(code == 1);
      CHECK(said.find("xpyd: no memory") != said.npos);
    }
}

TEST_CASE("issue: a conductor or worker that found no descriptor at its start aborted",
          "[control][attack]") {
  RealClock clock;
  const ControlEndpoint here{
      "127.0.0.1:0", ClusterKey::random(), {NodeRole::conductor, "conductor"}};
  std::unique_ptr<ControlLoop> loop;
  {
    NoDescriptors none;
    loop = std::make_unique<ControlLoop>(clock);
  }
  const auto nobody = [](ChannelPtr) { return ChannelEvents{}; };
  const Result<std::string> listening = loop->listen(here, nobody);
  REQUIRE(!listening);
  CHECK(listening.error().code == ErrorCode::unavailable);  // a worker tries again
  CHECK(listening.error().message == "epoll: Too many open files");
  const Result<ChannelPtr> channel = loop->connect(here, 1, nobody);
  REQUIRE(!channel);
  CHECK(channel.error().code == ErrorCode::unavailable);
}

TEST_CASE("issue: a server without descriptors at its end left its key behind",
          "[private_folder][attack]") {
  std::string path;
  {
    auto folder = std::make_unique<PrivateFolder>();
    path = folder->path();
    REQUIRE(path != "");
    std::ofstream(path + "/key") << "secret";
    NoDescriptors none;
    folder.reset();
  }
  CHECK(!std::filesystem::exists(path));
  NoDescriptors none;
  PrivateFolder folder;  // nor is one made that could not be removed
  CHECK(errno == EMFILE);
  CHECK(folder.path() == "");
}

// Each that left had all that waited look at all connections: 70 ms for one that came and went, and
// /health was silent for 20 s.
TEST_CASE("issue: one address that came and went kept everybody else waiting",
          "[server][limits][attack]") {
  raise_descriptor_limit();
  TestServer server([](ServerOptions& o) {
    o.max_connections = 1200;
    o.max_connections_per_address = 600;
  });
  const std::string request =
      request_text("POST", "/v1/completions", R"({"prompt":"x","max_tokens":1})");
  server.service.hold(true);
  std::vector<std::unique_ptr<Client>> active, waiting;
  for (int i = 0; i < 600; ++i) {
    active.push_back(std::make_unique<Client>(server.port()));
    active.back()->send(request.substr(0, request.size() - 3));
  }
  for (int i = 0; i < 650; ++i) {
    waiting.push_back(std::make_unique<Client>(server.port()));
    waiting.back()->send(request);
  }
  REQUIRE(server.get("/health").status == 200);
  const std::clock_t before = std::clock();
  active.resize(200);  // 400 leave, and 400 of those who wait take their places
  CHECK(server.service.wait([](const FakeService& s) { return s.in_flight() == 400; }));
  CHECK(double(std::clock() - before) / CLOCKS_PER_SEC < 1.5);  // it was 6
  server.service.hold(false);
}

}  // namespace xpyd::testing
