// What a server says on stderr, who reads it or does not, and what a killed one leaves behind.
// XPYD_BIN names the program; `make test` sets it.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include "base/files.h"
#include "experiments/subcommands.h"
#include "server/api.h"
#include "server/stack.h"
#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::log_test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

// Demo model, small; its stderr is a pipe that is read when the test wants it.
class Piped {
 public:
  enum Reader { later, never, gone };
  explicit Piped(const Words& more, Reader reader = later) {
    Words words = {std::getenv("XPYD_BIN"), "serve", "--port", "0", "--threads", "1"};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    stderr_ = ends[0];
    if (reader == never) fill();
    if (reader == gone) close(std::exchange(stderr_, -1));
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], 2);
      setenv("TMPDIR", dir_.path.c_str(), 1);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    fcntl(stderr_, F_SETFL, O_NONBLOCK);
  }
  ~Piped() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    close(stderr_);
  }
  // Reads until it has said so, or has ended, or 60 s have passed.
  bool said(const std::string& what) {
    for (int i = 0; i < 3000; ++i) {
      const bool over = ended();
      read_now();
      if (text.find(what) != text.npos) return true;
      if (over) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }
  int port() {
    const std::string mark = " on http://127.0.0.1:";
    REQUIRE(said(mark));
    return std::atoi(text.c_str() + text.find(mark) + mark.size());
  }
  void read_now() {
    char part[4096];
    for (ssize_t n; (n = read(stderr_, part, sizeof part)) > 0;) text.append(part, size_t(n));
  }
  // As if others had written to it, who have the same pipe.
  void fill() {
    const std::string path = "/proc/self/fd/" + std::to_string(stderr_);
    const int mine = open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    REQUIRE(mine >= 0);
    const std::string line(PIPE_BUF, '.');
    while (write(mine, line.data(), line.size()) > 0) continue;
    while (write(mine, line.data(), 1) > 0) continue;
    close(mine);
  }
  bool ended() {
    if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) pid_ = -1;
    return pid_ < 0;
  }
  // Its exit code, -1: it still ran after 30 s.
  int end(int signal) {
    if (pid_ > 0 && signal) kill(pid_, signal);
    for (int i = 0; i < 1500 && !ended(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    read_now();
    return pid_ > 0 ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string text;
  int status = 0;

 private:
  TempDir dir_;
  pid_t pid_ = -1;
  int stderr_ = -1;
};

bool has(const std::string& text, const char* pattern) {
  return std::regex_search(text, std::regex(pattern, std::regex::multiline));
}

#define STAMP R"(^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z )"

}  // namespace

TEST_CASE("issue: a server whose stderr nobody reads stopped when the pipe was full", "[issues][log]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set: make test sets it");
  Piped server({"--kv-bytes", "2MiB", "--topology", "1C"});
  const int port = server.port();
  const std::string ask = request_text("POST", "/v1/completions", R"({"prompt":"The","max_tokens":1})");
  server.fill();
  for (int i = 0; i < 3; ++i) {  // each of them a line
    Client client(port);
    client.send(ask);
    CHECK(client.read().status == 200);
  }
  server.read_now();
  Client client(port);
  client.send(ask);
  CHECK(client.read().status == 200);
  CHECK(server.said("warning stderr was full: dropped_lines="));  // 3, or 2: a line follows its answer
  server.fill();
  CHECK(server.end(SIGTERM) == 0);
}

TEST_CASE("issue: a server whose stderr was full or unread before its start hung, or ended by SIGPIPE",
          "[issues][log]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set: make test sets it");
  const auto reader = GENERATE(Piped::never, Piped::gone);
  const int port = free_port();
  Piped server({"--kv-bytes", "2MiB", "--topology", "1C", "--port", std::to_string(port)}, reader);
  const std::string ask = request_text("POST", "/v1/completions", R"({"prompt":"The","max_tokens":1})");
  int status = 0;
  for (int i = 0; i < 600 && status != 200 && !server.ended(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (!Client::connects(port)) continue;
    Client client(port);
    client.send(ask);
    status = client.read().status;
  }
  CHECK(status == 200);
  CHECK(server.end(SIGTERM) == 0);
}

TEST_CASE("issue: why a worker failed at start stood above the server's own error line", "[issues][log]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set: make test sets it");
  Piped server({"--kv-bytes", "2MiB", "--topology", "1C", "--processes", "--host-kv-bytes", "1MiB", "--disk-kv-dir",
                "/nowhere/at/all"});
  CHECK(server.end(0) == 1);
  INFO(server.text);
  CHECK(has(server.text,
            "^xpyd serve: worker 0 ended: exit code 2, before all workers served: "
            "xpyd worker: --disk-kv-dir /nowhere/at/all: No such file"));
}

TEST_CASE("issue: only the request log had a time and a level", "[issues][log]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set: make test sets it");
  const Words words = {"--kv-bytes", "2MiB", "--topology", "1C", "--processes"};
  Piped server(words);
  server.port();
  CHECK(server.end(SIGTERM) == 0);
  INFO(server.text);
  CHECK(has(server.text, STAMP "info xpyd worker: C0 \\(instance \\d+\\) serves, control "));
  CHECK(has(server.text, STAMP "info xpyd serve: draining; a second signal stops at once$"));
  CHECK(has(server.text, "^xpyd serve: .* on http://127.0.0.1:\\d+$"));  // for whoever starts it

  Words quiet = words;
  quiet.insert(quiet.end(), {"--log-level", "error"});
  Piped second(quiet);
  second.port();
  CHECK(second.end(SIGTERM) == 0);
  INFO(second.text);
  CHECK(!has(second.text, STAMP));
  CHECK(!has(second.text, "draining"));
}

TEST_CASE("issue: kill -9 of a server left its folder with the cluster's key for ever", "[issues][private_folder]") {
  TempDir dir;
  const std::string tmp = fs::absolute(dir.path).string();
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before ? before : "";
  setenv("TMPDIR", tmp.c_str(), 1);
  const std::string mine = tmp + "/xpyd-models";  // a user's own of the same form
  fs::create_directory(mine);
  chmod(mine.c_str(), 0700);
  std::ofstream(mine + "/key") << "mine";
  fs::create_directory(tmp + "/other");
  chmod((tmp + "/other").c_str(), 01700);
  std::ofstream(tmp + "/other/key") << "mine";
  fs::create_directory_symlink(tmp + "/other", tmp + "/xpyd-linked");
  std::string lives;
  {
    PrivateFolder live;
    lives = live.path();
    std::ofstream(lives + "/key") << "secret";
    const pid_t child = fork();  // which ends without its destructors
    if (child == 0) {
      PrivateFolder* killed = new PrivateFolder;
      std::ofstream(killed->path() + "/key") << "secret";
      _exit(fs::exists(killed->path() + "/key") ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(status == 0);
    const auto all = [&] { return std::distance(fs::directory_iterator(tmp), {}); };
    CHECK(all() == 5);  // three of others, the living one, the dead one
    PrivateFolder next;
    CHECK(all() == 5);
    CHECK(fs::exists(next.path()));
    CHECK(fs::exists(lives + "/key"));
  }
  CHECK(!fs::exists(lives));
  CHECK(fs::exists(mine + "/key"));
  CHECK(fs::exists(tmp + "/xpyd-linked/key"));
  CHECK(std::distance(fs::directory_iterator(tmp), {}) == 3);
  before ? setenv("TMPDIR", kept.c_str(), 1) : unsetenv("TMPDIR");
}

TEST_CASE("issue: without stderr the log was written into the KV pool", "[issues][log]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set: make test sets it");
  const std::string command = std::string("exec '") + std::getenv("XPYD_BIN") +
                              "' serve --topology 1C --port 0 --kv-bytes 1MiB --threads 1 "
                              "--allocator vattention <&- >&- 2>&-";
  const pid_t pid = fork();
  if (pid == 0) {
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  const std::string of = "/proc/" + std::to_string(pid) + "/fd";
  const auto files = [&] {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& fd : fs::directory_iterator(of, none)) names.push_back(fs::read_symlink(fd.path(), none).string());
    return names;
  };
  const auto has_pool = [&] {
    return std::ranges::any_of(files(), [](auto& name) { return name.starts_with("/memfd:"); });
  };
  for (int i = 0; i < 3000 && !has_pool(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(has_pool());
  for (const char* fd : {"/0", "/1", "/2"}) CHECK(fs::read_symlink(of + fd) == "/dev/null");
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

TEST_CASE("issue: --allowed-hosts with capitals was no Origin", "[issues][api]") {
  HttpRequest request;
  request.method = "GET";
  for (const char* host : {"llm.example", "LLM.Example", "127.0.0.1"}) {
    request.headers = {{"host", host}, {"origin", "https://llm.EXAMPLE"}};
    CHECK(!object_to(request, {"LLM.example"}));
  }
  request.headers = {{"host", "127.0.0.1"}, {"origin", "https://other.example"}};
  CHECK(object_to(request, {"LLM.example"}));
}

TEST_CASE("issue: --cluster-key-file and others were ignored without a word", "[issues][options]") {
  const auto said = [](const char* group, const Words& words) {
    const auto options = Options::parse(all_options(), group, words, 1);
    REQUIRE(options);
    return without_effect(options.value());
  };
  CHECK(said("serve", {"--cluster-key-file", "key", "--lease", "2"}) ==
        Words{"--lease is for --processes alone", "--cluster-key-file is for --processes alone"});
  CHECK(said("serve", {"--cluster-key-file", "key", "--processes"}).empty());
  CHECK(said("worker", {"--cluster-key-file", "key", "--join", "127.0.0.1:1"}).empty());
  CHECK(said("serve", {"--gpu-split", "off"}) == Words{"--gpu-split is for --device cuda alone"});
  CHECK(said("serve", {"--gpu-split", "off", "--device", "cuda"}).empty());
  CHECK(said("worker", {"--transport", "fault:rdma,drop=0.1", "--rdma-nics", "mlx5_0:1"}).empty());
  CHECK(said("serve", {}).empty());
  CHECK(said("serve", {"--replication", "heat", "--kv-load", "cost", "--fetch-threshold", "2"}) ==
        Words{"--kv-load is for --host-kv-bytes alone", "--fetch-threshold is for --placement mooncake alone",
              "--replication is for --kv-fetch alone"});
  CHECK(said("serve", {"--replication", "heat", "--kv-fetch", "cost", "--kv-load", "cost", "--host-kv-bytes", "1MiB"})
            .empty());
  // What is a text needs one that is not empty: a stage was told that its --rank-group counts for nothing.
  CHECK(said("worker", {"--registry", "etcd://10.0.0.9:2379", "--rank-group", "big"}).empty());
  CHECK(said("worker", {"--join", "127.0.0.1:1", "--rank-group", "big"}) ==
        Words{"--rank-group is for --registry alone"});
}

}  // namespace xpyd::testing::log_test
