// `xpyd serve --processes` under faults of its workers and of its own start, as a user meets them.
// XPYD_BIN names the program; `make test` sets it.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::supervision_test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

double now_s() { return RealClock().now(); }

bool until(double seconds, const std::function<bool()>& done) {
  for (const double end = now_s() + seconds; !done();) {
    if (now_s() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

// The server, with a temporary folder of its own that nothing may be left in.
class Server {
 public:
  explicit Server(const Words& more, rlim_t address_space = RLIM_INFINITY, bool processes = true) {
    fs::create_directories(dir.path + "/model");
    fs::create_directories(dir.path + "/tmp");
    std::ofstream(dir.path + "/model/config.json")
        << R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu",
    "hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":4,
    "num_key_value_heads":2,"vocab_size":256,"max_position_embeddings":512,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"tie_word_embeddings":false})";
    Words words = {std::getenv("XPYD_BIN"),
                   "serve",
                   fs::absolute(dir.path + "/model").string(),
                   "--load-format",
                   "dummy",
                   "--threads",
                   "1",
                   "--max-batch",
                   "4"};
    if (processes) words.push_back("--processes");
    words.insert(words.end(), more.begin(), more.end());
    if (std::find(words.begin(), words.end(), "--port") == words.end()) words.insert(words.end(), {"--port", "0"});
    if (std::find(words.begin(), words.end(), "--kv-bytes") == words.end())
      words.insert(words.end(), {"--kv-bytes", "1MiB"});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string log = dir.path + "/log", tmp = fs::absolute(dir.path + "/tmp").string();
    int begun[2];  // its end tells that the program runs, and no longer this one's signal handlers
    REQUIRE(pipe2(begun, O_CLOEXEC) == 0);
    pid = fork();
    if (pid == 0) {
      dup2(open(log.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 2);
      close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);  // this program's files are no business of its
      setenv("TMPDIR", tmp.c_str(), 1);
      setenv("XDG_CACHE_HOME", (tmp + "-cache").c_str(), 1);
      const rlimit limit = {address_space, RLIM_INFINITY};
      setrlimit(RLIMIT_AS, &limit);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(begun[1]);
    char none;
    CHECK(read(begun[0], &none, 1) == 0);
    close(begun[0]);
  }
  ~Server() {
    const std::set<pid_t> left = workers();
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (pid_t worker : left) kill(worker, SIGKILL);
  }
  int port() {
    const std::string mark = "on http://127.0.0.1:";
    until(60, [&] {
      const std::string text = log();
      const size_t at = text.find(mark);
      return ended() || (at != text.npos && text.find('\n', at) != text.npos);
    });
    const std::string text = log();
    const size_t at = text.find(mark);
    return at == text.npos ? 0 : std::atoi(text.c_str() + at + mark.size());
  }
  std::string log() const {
    std::stringstream text;
    text << std::ifstream(dir.path + "/log").rdbuf();
    return text.str();
  }
  bool ended() {
    siginfo_t info{};
    return pid < 0 || (waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid);
  }
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::set<pid_t> workers() const {
    std::set<pid_t> all;
    std::error_code gone;
    for (auto& task : fs::directory_iterator("/proc/" + std::to_string(pid) + "/task", gone)) {
      std::ifstream children(task.path() / "children");
      for (pid_t child; children >> child;) all.insert(child);
    }
    return all;
  }
  // The worker of a role, by its command line; -1: none.
  pid_t worker(const std::string& role) const {
    for (pid_t child : workers()) {
      std::stringstream words;
      words << std::ifstream("/proc/" + std::to_string(child) + "/cmdline").rdbuf();
      if (words.str().find(std::string("--role") + '\0' + role + '\0') != std::string::npos) return child;
    }
    return -1;
  }
  size_t files_left() const {
    size_t n = 0;
    for ([[maybe_unused]] auto& file : fs::directory_iterator(dir.path + "/tmp")) ++n;
    return n;
  }

  TempDir dir;
  pid_t pid = -1;
};

Reply get(int port, const std::string& path) {
  Client client(port);
  client.send(request_text("GET", path, ""));
  return client.read();
}

std::set<std::string> sockets_of(pid_t pid) {
  std::set<std::string> all;
  std::error_code gone;
  for (auto& fd : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", gone)) {
    const std::string what = fs::read_symlink(fd.path(), gone);
    if (what.starts_with("socket:")) all.insert(what);
  }
  return all;
}

#define NEEDS_PROGRAM() \
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set")

TEST_CASE("serve: a bad or busy --cluster-bind is one line and exit code 2, and leaves nothing",
          "[issues][supervision]") {
  NEEDS_PROGRAM();
  TempDir dir;
  const std::string file = fs::absolute(dir.path + "/f").string();
  std::ofstream(file) << "x\n";
  int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof at;
  REQUIRE(bind(tcp, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
  REQUIRE(listen(tcp, 1) == 0);
  REQUIRE(getsockname(tcp, reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
  int live = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string path = dir.path + "/live";
  std::copy(path.begin(), path.end(), name.sun_path);
  REQUIRE(bind(live, reinterpret_cast<sockaddr*>(&name), sizeof name) == 0);
  REQUIRE(listen(live, 1) == 0);
  const Words bad = {"nonsense",
                     ":7000",
                     "127.0.0.1:99999",
                     "::1:7000",
                     "192.0.2.1:7000",
                     "unix:",
                     "unix:/" + std::string(200, 'x'),
                     "unix:/nowhere/at/all",
                     "unix:" + fs::absolute(dir.path).string(),
                     "unix:" + file,
                     "unix:" + fs::absolute(path).string(),
                     "127.0.0.1:" + std::to_string(ntohs(at.sin_port))};
  for (const std::string& address : bad) {
    INFO(address);
    Server server({"--topology", "1C", "--cluster-bind", address});
    CHECK(server.wait() == 2);
    const std::string log = server.log();
    INFO(log);
    CHECK(count(log, "xpyd serve: --cluster-bind: ") == 1);
    CHECK(log.find('\n', log.find("xpyd serve: --cluster-bind: ")) == log.size() - 1);
    CHECK(server.files_left() == 0);
  }
  CHECK(fs::is_regular_file(file));
  CHECK(fs::file_size(file) == 2);
  CHECK(fs::is_socket(path));
  close(tcp);
  close(live);
}

TEST_CASE("serve: a worker holds no socket of the conductor, whose port is free when it is killed",
          "[issues][supervision]") {
  NEEDS_PROGRAM();
  Server server({"--topology", "1P1D"});
  const int port = server.port();
  REQUIRE(port > 0);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<Client>(port));
    clients.back()->send(request_text("GET", "/version", ""));
    CHECK(clients.back()->read().status == 200);
  }
  const pid_t before = server.worker("prefill");
  kill(before, SIGKILL);  // the next one is started while clients are connected
  REQUIRE(until(20, [&] {
    const pid_t now = server.worker("prefill");
    return now > 0 && now != before && get(port, "/ready").status == 200;
  }));
  const std::set<std::string> own = sockets_of(server.pid);
  CHECK(own.size() > 20);
  const std::set<pid_t> workers = server.workers();
  REQUIRE(workers.size() == 2);
  for (pid_t worker : workers) {
    for (const std::string& held : sockets_of(worker)) CHECK(own.count(held) == 0);
    for (const char* fd : {"/fd/0", "/fd/1"})  // else `serve | tee` waits for it
      CHECK(fs::read_symlink("/proc/" + std::to_string(worker) + fd) == "/dev/null");
  }
  // What a child would inherit if nothing closed it for it: this process's own three.
  for (auto& fd : fs::directory_iterator("/proc/" + std::to_string(server.pid) + "/fdinfo")) {
    std::stringstream info;
    info << std::ifstream(fd.path()).rdbuf();
    const size_t flags = info.str().find("flags:");
    if (flags == std::string::npos || std::stoi(fd.path().filename()) <= 2) continue;  // or closed
    INFO(fd.path() << "\n" << info.str());
    CHECK((std::stoi(info.str().substr(flags + 6), nullptr, 8) & O_CLOEXEC) != 0);
  }
  for (pid_t worker : workers) kill(worker, SIGSTOP);  // so that they stay
  kill(server.pid, SIGKILL);
  server.wait();
  Server next({"--topology", "1C", "--port", std::to_string(port)}, RLIM_INFINITY, false);
  CHECK(next.port() == port);
  for (auto& client : clients) CHECK(client->at_end());
  for (pid_t worker : workers) kill(worker, SIGKILL);
}

// A start whose workers all fail: soon, once, with the worker's words, and nothing stays behind.
void check_failed_start(const Words& more, rlim_t address_space, const char* says) {
  Words words = {"--topology", "1P1D"};
  words.insert(words.end(), more.begin(), more.end());
  Server server(words, address_space);
  const double start = now_s();
  CHECK(server.wait() == 1);
  const std::string log = server.log();
  INFO(log);
  CHECK(now_s() - start < 20);
  CHECK(log.find(says) != log.npos);
  CHECK(count(log, "before all workers served") == 1);
  CHECK(log.find("is started again") == log.npos);
  CHECK(server.files_left() == 0);
}

TEST_CASE("serve: workers that fail at start end it within seconds, with their message", "[issues][supervision]") {
  NEEDS_PROGRAM();
  check_failed_start({"--host-kv-bytes", "1MiB", "--disk-kv-dir", "/nowhere/at/all"}, RLIM_INFINITY,
                     "--disk-kv-dir /nowhere/at/all: No such file");
}

TEST_CASE("serve: workers without memory at start end it within seconds (ulimit -v)", "[issues][supervision]") {
  NEEDS_PROGRAM();
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  SKIP_TEST("a sanitizer's shadow alone is larger than the limit");
#endif
  check_failed_start({"--kv-bytes", "8GiB"}, rlim_t(2) << 30, "xpyd worker: ");
}

TEST_CASE("serve: SIGTERM ends a start at once, though its workers never join", "[issues][supervision]") {
  NEEDS_PROGRAM();
  for (int signal : {SIGTERM, SIGINT}) {
    std::optional<Server> held;
    std::set<pid_t> workers;
    for (int tries = 0; tries < 50; ++tries) {                          // workers may be quicker than this test
      held.emplace(Words{"--topology", "1P1D", "--kv-bytes", "1GiB"});  // touching it takes a while
      // Each its own program by now: one that is stopped before its exec() holds up posix_spawn().
      REQUIRE(until(30, [&] {
        workers = {held->worker("prefill"), held->worker("decode")};
        return workers.size() == 2 && !workers.count(-1);
      }));
      for (pid_t worker : workers) kill(worker, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for words on their way
      if (held->log().find("on http://") == std::string::npos) break;
      held.reset();
    }
    REQUIRE(held);
    Server& server = *held;
    const double start = now_s();
    kill(server.pid, signal);
    CHECK(server.wait() == 128 + signal);
    CHECK(now_s() - start < 20);  // of it 2 s in which the workers may end by themselves
    for (pid_t worker : workers) CHECK(kill(worker, 0) != 0);
    CHECK(server.files_left() == 0);
  }
  {  // while it measures this machine, and has made nothing yet
    TempDir cache;  // in which no peak is known
    setenv("XDG_CACHE_HOME", cache.path.c_str(), 1);
    Server server({"--topology", "1P1D", "--disagg", "conditional_cost"});
    REQUIRE(until(10, [&] { return server.log().find("--disagg") != std::string::npos; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK_FALSE(server.ended());
    kill(server.pid, SIGTERM);
    if (!until(1.5, [&] { return server.ended(); })) {
      FAIL_CHECK("it goes on");
      kill(server.pid, SIGKILL);
    }
    CHECK(server.wait() == 128 + SIGTERM);
    CHECK(server.files_left() == 0);
    unsetenv("XDG_CACHE_HOME");
  }
  for (int processes = 0; processes < 2; ++processes) {  // from the first instruction
    Server server({"--topology", "1P1D"}, RLIM_INFINITY, processes == 1);
    kill(server.pid, SIGTERM);
    CHECK(server.wait() == 128 + SIGTERM);
    CHECK(server.files_left() == 0);
  }
}

TEST_CASE("serve: a model folder that is gone for seconds takes no worker away for ever", "[issues][supervision]") {
  NEEDS_PROGRAM();
  Server server({"--topology", "1P1D"});
  const int port = server.port();
  REQUIRE(port > 0);
  CHECK(get(port, "/health").status == 200);
  const std::string model = server.dir.path + "/model";
  fs::rename(model, model + "-away");
  kill(server.worker("prefill"), SIGKILL);
  REQUIRE(until(20, [&] { return count(server.log(), "exit code 2") >= 4; }));
  const Reply health = get(port, "/health"), ready = get(port, "/ready");
  CHECK(health.status == 503);
  CHECK(health.body == R"({"status":"unhealthy","reason":"no instance is there for prefill"})");
  CHECK(ready.status == 503);
  CHECK(ready.body.find(R"("reason":"no instance is there for prefill")") != std::string::npos);
  fs::rename(model + "-away", model);
  CHECK(until(30, [&] { return get(port, "/ready").status == 200; }));
  CHECK(get(port, "/health").status == 200);
  const std::string log = server.log();
  INFO(log);
  for (const char* wait : {"0.1", "0.2", "0.4", "0.8"}) CHECK(count(log, std::string("again in ") + wait + " s") >= 1);
  // However often P came anew, its series in /metrics is one.
  const std::string metrics = get(port, "/metrics").body;
  CHECK(metrics.find("engine=\"P0\"") != metrics.npos);
  CHECK(metrics.find("engine=\"P1\"") == metrics.npos);
}

TEST_CASE("serve: a stopped worker is killed and replaced, and until then health says what is missing",
          "[issues][supervision]") {
  NEEDS_PROGRAM();
  Server server({"--topology", "1P1D", "--lease", "1"});
  const int port = server.port();
  REQUIRE(port > 0);
  const pid_t stopped = server.worker("prefill"), decode = server.worker("decode");
  kill(stopped, SIGSTOP);
  CHECK(until(20, [&] { return get(port, "/health").status == 503; }));
  CHECK(get(port, "/health").body.find("no instance is there for prefill") != std::string::npos);
  CHECK(until(40, [&] { return get(port, "/health").status == 200; }));
  CHECK(kill(stopped, 0) != 0);
  CHECK(server.worker("prefill") != stopped);
  CHECK(server.worker("decode") == decode);
  CHECK(count(server.log(), "does not answer: it is killed") == 1);
  Client client(port);
  client.send(request_text("POST", "/v1/completions", R"({"prompt":[1,2,3],"ignore_eos":true,"max_tokens":5})"));
  CHECK(client.read().status == 200);
  kill(server.pid, SIGTERM);
  CHECK(server.wait() == 0);
  CHECK(server.files_left() == 0);
}

TEST_CASE("serve: a worker that was stopped while it started was left for --worker-start-timeout",
          "[issues][supervision]") {
  NEEDS_PROGRAM();
  Server server({"--topology", "1P1D", "--lease", "1"});
  const int port = server.port();
  REQUIRE(port > 0);
  const pid_t first = server.worker("prefill");
  kill(first, SIGKILL);
  pid_t stopped = first;
  for (const double end = now_s() + 20; (stopped == first || stopped < 0) && now_s() < end;)
    stopped = server.worker("prefill");
  REQUIRE(stopped > 0);
  REQUIRE(kill(stopped, SIGSTOP) == 0);
  CHECK(until(40, [&] { return get(port, "/health").status == 200; }));
  CHECK(server.worker("prefill") != stopped);
  CHECK(count(server.log(), "does not answer: it is killed") == 1);
}

TEST_CASE("serve: a worker that somebody else told to end stayed away; one that was retired does",
          "[issues][supervision]") {
  NEEDS_PROGRAM();
  Server server({"--topology", "1P1D", "--dev-endpoints"});
  const int port = server.port();
  REQUIRE(port > 0);
  for (const char* role : {"prefill", "decode"}) {
    const pid_t told = server.worker(role);
    kill(told, SIGTERM);
    CHECK(until(30, [&] {
      const pid_t now = server.worker(role);
      return now > 0 && now != told && get(port, "/ready").status == 200;
    }));
  }
  CHECK(count(server.log(), "ended: exit code 0; it is started again") == 2);
  Client client(port);
  client.send(request_text("POST", "/retire_instance", R"({"name":"P0"})", "Content-Type: application/json\r\n"));
  CHECK(client.read().status == 200);
  CHECK(until(30, [&] { return server.log().find("ended: exit code 0\n") != std::string::npos; }));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  CHECK(server.worker("prefill") == -1);
}

TEST_CASE("serve: a worker that ends while the conductor has no descriptor left is started when it has",
          "[issues][supervision]") {
  NEEDS_PROGRAM();
#if defined(__SANITIZE_ADDRESS__)
  SKIP_TEST("UBSan looks at memory through a pipe, and takes none for an error");
#endif
  Server server({"--topology", "1P1D"});
  const int port = server.port();
  REQUIRE(port > 0);
  rlimit before{};
  REQUIRE(prlimit(server.pid, RLIMIT_NOFILE, nullptr, &before) == 0);
  const rlimit few = {3, before.rlim_max};
  REQUIRE(prlimit(server.pid, RLIMIT_NOFILE, &few, nullptr) == 0);
  kill(server.worker("prefill"), SIGKILL);
  CHECK(until(20, [&] { return count(server.log(), "it cannot be started: Too many open files") >= 3; }));
  REQUIRE(prlimit(server.pid, RLIMIT_NOFILE, &before, nullptr) == 0);
  CHECK(until(30, [&] { return get(port, "/ready").status == 200; }));
}

TEST_CASE("serve: while it drains, probes are answered, with 503", "[issues][supervision]") {
  TestServer server;
  server.service.hold(true);
  Client streaming(server.port());
  streaming.send(request_text("POST", "/v1/completions", R"({"prompt":"a","max_tokens":20,"stream":true})"));
  REQUIRE(server.service.wait([](auto& s) { return s.in_flight() == 1; }));
  const int port = server.port();
  server.server->begin_drain();
  REQUIRE(until(20, [&] { return get(port, "/health").status == 503; }));
  for (const char* path : {"/health", "/ready", "/health/ready"}) {
    Client probe(port);
    probe.send(request_text("GET", path, ""));
    const Reply reply = probe.read();
    CHECK(reply.status == 503);
    CHECK(reply.body.find("\"reason\":\"draining\"") != std::string::npos);
    CHECK(probe.at_end());
  }
  Client newcomer(port), silent(port);
  newcomer.send(request_text("POST", "/v1/completions", R"({"prompt":"a"})"));
  CHECK(newcomer.read().status == 503);
  server.service.hold(false);
  CHECK(streaming.read().complete);
  streaming.close();
  server.join();  // it does not wait for the silent one, which came too late
  CHECK(server.service.seen().size() == 1);
}

TEST_CASE("worker: an address that cannot be one ends it, with exit code 2", "[issues][supervision]") {
  NEEDS_PROGRAM();
  TempDir dir;
  const std::string log = dir.path + "/log";
  const std::string command = std::string(std::getenv("XPYD_BIN")) + " worker --join nonsense --kv-bytes 1MiB 2>" + log;
  const int status = std::system(("timeout 30 " + command).c_str());
  CHECK(WEXITSTATUS(status) == 2);
}

}  // namespace
}  // namespace xpyd::testing::supervision_test
