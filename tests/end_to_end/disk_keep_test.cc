// `xpyd serve --disk-kv-keep on`, killed and started again: the first prompt that comes again is on the disk, with the
// same bits; and what cannot be read there is computed, with a line that says why. XPYD_BIN names the program.
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::disk_keep_test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

bool until(double seconds, const std::function<bool()>& done) {
  for (int i = 0; i < int(seconds * 50); ++i) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

// One life of a server: the demo model, or that of a folder, with room for a few prompts above its disk.
class Server {
 public:
  Server(const std::string& folder, const Words& more, const std::string& model = "") {
    Words words = {std::getenv("XPYD_BIN"), "serve"};
    if (!model.empty()) words.push_back(model);
    words.insert(words.end(), {"--port",          "0",    "--threads",     "1",    "--max-batch",     "4",
                               "--max-model-len", "400",  "--kv-bytes",    "4MiB", "--prefix-cache",  "off",
                               "--host-kv-bytes", "2MiB", "--disk-kv-dir", folder, "--disk-kv-bytes", "16MiB",
                               "--disk-kv-keep",  "on"});
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(log_path().c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 2);
      close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
      setenv("TMPDIR", dir_.path.c_str(), 1);
      execv(argv[0], argv.data());
      _exit(127);
    }
  }
  ~Server() { end(SIGKILL); }
  int end(int signal) {
    if (pid_ <= 0) return 0;
    int status = 0;
    if (signal) kill(pid_, signal);
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string log() const {
    std::stringstream text;
    text << std::ifstream(log_path()).rdbuf();
    return text.str();
  }
  int port() {
    const std::string mark = "on http://127.0.0.1:";
    if (port_ == 0) {
      until(60, [&] {
        const size_t at = log().find(mark);
        return at != std::string::npos && log().find('\n', at) != std::string::npos;
      });
      INFO(log());
      REQUIRE(log().find(mark) != std::string::npos);
      port_ = std::atoi(log().c_str() + log().find(mark) + mark.size());
    }
    return port_;
  }
  Reply ask(const std::string& method, const std::string& path, const std::string& body = "") {
    Client client(port());
    client.send(request_text(method, path, body));
    return client.read();
  }
  // 200 tokens of that family, 12 blocks; what is said, with the logprobs that it was said with. "": nobody is there.
  std::string prompt(int family) {
    std::string tokens;
    for (int i = 0; i < 200; ++i) tokens += (i ? "," : "") + std::to_string(5 + (i * 7 + family * 31) % 800);
    const Reply reply = ask(
        "POST", "/v1/completions",
        R"({"max_tokens":12,"temperature":0,"ignore_eos":true,"logprobs":2,"prompt":[)" + tokens + "]}");
    if (reply.status == 503) return "";
    INFO(reply.body);
    REQUIRE(reply.status == 200);
    return as_text(parsed(reply.body)["choices"]);
  }
  double metric(const std::string& name, const std::string& label) {
    std::istringstream text(ask("GET", "/metrics").body);
    double sum = 0;
    for (std::string line; std::getline(text, line);)
      if (line.find(name + "{") != line.npos && line.find(label) != line.npos)
        sum += std::atof(line.c_str() + line.rfind(' '));
    return sum;
  }
  double disk_hits() { return metric("kv_tier_hit_tokens_total", "tier=\"disk\""); }
  pid_t worker(const std::string& role) const {
    for (const auto& task : fs::directory_iterator("/proc/" + std::to_string(pid_) + "/task")) {
      std::ifstream children(task.path() / "children");
      for (pid_t child; children >> child;) {
        std::stringstream words;
        words << std::ifstream("/proc/" + std::to_string(child) + "/cmdline").rdbuf();
        if (words.str().find(std::string("--role") + '\0' + role + '\0') != std::string::npos) return child;
      }
    }
    return -1;
  }
  // More than the host has room for, so that the first of them is on the disk. What it said to each.
  std::vector<std::string> fill(int families) {
    std::vector<std::string> said;
    const auto written = [&] { return metric("kv_tier_bytes_total", "way=\"host_to_disk\""); };
    for (int family = 0; family < families; ++family) {
      said.push_back(prompt(family));
      // What a disk that is busy with others does not take in time is dropped: each prompt's has time.
      for (double before = -1; before != written(); std::this_thread::sleep_for(std::chrono::milliseconds(50)))
        before = written();
    }
    CHECK(until(30, [&] { return written() >= 14 * 65536.0; }));
    return said;
  }

 private:
  std::string log_path() const { return dir_.path + "/log"; }
  TempDir dir_;
  pid_t pid_ = -1;
  int port_ = 0;
};

#define NEEDS_PROGRAM() \
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set")

TEST_CASE("serve: killed and started again, a prompt that comes again is on the disk", "[disk_keep]") {
  NEEDS_PROGRAM();
  TempDir dir;
  std::vector<std::string> said;
  {
    Server server(dir.path, {"--topology", "1C"});
    said = server.fill(6);
    CHECK(server.end(SIGKILL) == 128 + SIGKILL);
  }
  for (int life = 0; life < 2; ++life) {
    Server server(dir.path, {"--topology", "1C"});
    CHECK(server.prompt(0) == said[0]);
    CHECK(server.disk_hits() == 192);
    INFO(server.log());
    CHECK(count(server.log(), "blocks are known again") == 1);
    if (life == 1) {
      for (int family = 0; family < 6; ++family) CHECK(server.prompt(family) == said[size_t(family)]);
      CHECK(server.metric("kv_tier_failures_total", "") == 0);
    }
    CHECK(server.end(life == 0 ? SIGKILL : SIGTERM) == (life == 0 ? 128 + SIGKILL : 0));
  }
}

TEST_CASE("serve: a worker that is killed finds its disk again", "[disk_keep][processes]") {
  NEEDS_PROGRAM();
  TempDir dir;
  Server server(dir.path, {"--topology", "1P1D", "--processes", "--transport", "tcp"});
  const std::vector<std::string> said = server.fill(6);
  CHECK(fs::exists(dir.path + "/xpyd-P-0.kv"));
  CHECK(fs::exists(dir.path + "/xpyd-D-0.kv"));
  const pid_t worker = server.worker("prefill");
  REQUIRE(worker > 0);
  CHECK(server.disk_hits() == 0);
  kill(worker, SIGKILL);
  CHECK(until(60, [&] { return count(server.log(), "xpyd-P-0.kv: ") == 1; }));
  CHECK(until(60, [&] { return server.prompt(0) == said[0]; }));
  CHECK(until(30, [&] { return server.disk_hits() > 0; }));  // by its next sign of life
  CHECK(fs::exists(dir.path + "/xpyd-P-1.kv") == false);
  for (int family = 0; family < 6; ++family) CHECK(server.prompt(family) == said[size_t(family)]);
}

TEST_CASE("serve: a kept disk of another model, another dtype, torn, or without a folder", "[disk_keep]") {
  NEEDS_PROGRAM();
  TempDir dir;
  const std::string folder = dir.path + "/kv", model = dir.path + "/model";
  fs::create_directory(folder);
  REQUIRE(std::system(("'" + std::string(std::getenv("XPYD_BIN")) + "' export '" + model + "' >/dev/null").c_str()) ==
          0);
  const auto fill = [&](const Words& more, const std::string& which) {
    Server server(folder, more, which);
    const std::vector<std::string> said = server.fill(4);
    server.end(SIGKILL);
    return said;
  };
  const std::string weights = model + "/model.safetensors";
  struct Case {
    const char* what;
    Words more;
    std::function<void()> change;
    const char* line;  // once
  };
  const Words plain = {"--topology", "1C"};
  const Case cases[] = {
      {"dtype",
       {"--topology", "1C", "--kv-dtype", "bf16"},
       [] {},
       "its KV dtype is f32, expected bf16; it begins empty"},
      {"weights' dtype",
       {"--topology", "1C", "--dtype", "bf16"},
       [] {},
       "its weights' dtype is f32, expected bf16"},  // (rounded, where the processor multiplies bf16)
      {"block", {"--topology", "1C", "--tier-block-tokens", "32"}, [] {}, "its block is 16 tokens, expected 32 tokens"},
      {"weights", plain,
       [&] {  // one byte of them, and the time of before
         const auto time = fs::last_write_time(weights);
         std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
         file.seekg(-1, std::ios::end);
         const char last = char(file.get() ^ 1);
         file.seekp(-1, std::ios::end);
         file.put(last);
         file.close();
         fs::last_write_time(weights, time);
       },
       "its model is model "},
      {"touched", plain, [&] { fs::last_write_time(weights, fs::file_time_type::clock::now()); },
       "its model is model "},
      {"tokenizer", plain, [&] { std::ofstream(model + "/tokenizer.json", std::ios::app) << "\n"; },
       "its tokenizer is "},
      {"index", plain, [&] { std::ofstream(folder + "/xpyd-C-0.index") << "{}"; },
       "its index is none; it begins empty"},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    fs::remove_all(folder);
    fs::create_directory(folder);
    const std::vector<std::string> before = fill(plain, model);
    c.change();
    Server server(folder, c.more, model);
    const std::string said = server.prompt(0);
    if (c.what == std::string("index")) CHECK(said == before[0]);
    CHECK(server.disk_hits() == 0);
    INFO(server.log());
    CHECK(count(server.log(), c.line) == 1);
    CHECK(count(server.log(), "xpyd-C-0.kv") == 1);
  }
  // Changed blocks are computed again; one line says so.
  fs::remove_all(folder);
  fs::create_directory(folder);
  const std::vector<std::string> said = fill(plain, model);
  {
    std::fstream file(folder + "/xpyd-C-0.kv", std::ios::in | std::ios::out | std::ios::binary);
    for (int block = 0; block < 256; ++block) file.seekp(block * 65536 + 99).put(char(block + 1));
  }
  {
    Server server(folder, plain, model);
    for (int family = 0; family < 4; ++family) CHECK(server.prompt(family) == said[size_t(family)]);
    CHECK(server.disk_hits() == 0);
    CHECK(server.metric("kv_tier_failures_total", "corrupt") > 0);
    CHECK(count(server.log(), "a block came back changed") == 1);
    // Its folder goes while it runs; then it is not there to begin with.
    fs::remove_all(folder);
    for (int family = 0; family < 8; ++family) {
      const std::string now = server.prompt(family % 4);
      CHECK(now == said[size_t(family % 4)]);
    }
  }
  Server without(folder, plain, model);
  CHECK(without.end(0) == 2);
  INFO(without.log());
  CHECK(count(without.log(), "--disk-kv-dir " + folder + ": No such file or directory; expected a folder") == 1);
}

TEST_CASE("serve: a disk that is full serves as one that is not", "[disk_keep]") {
  NEEDS_PROGRAM();
  TempDir dir;
  if (::mount("none", dir.path.c_str(), "tmpfs", 0, "size=17m") != 0) SKIP_TEST("no file system can be mounted here");
  const std::shared_ptr<void> mounted(nullptr, [&](void*) { ::umount2(dir.path.c_str(), MNT_DETACH); });
  {
    Server server(dir.path, {"--topology", "1C"});
    server.port();
    const fs::path rest = dir.path + "/rest";
    std::ofstream(rest) << std::string(2 << 20, 'x');
    const std::vector<std::string> said = server.fill(2 + 2);
    for (int family = 0; family < 60; ++family) server.prompt(family);
    for (int family = 0; family < 4; ++family) CHECK(server.prompt(family) == said[size_t(family)]);
    INFO(server.log());
    CHECK(count(server.log(), "No space left on device; no more KV is written there") == 1);
    server.end(SIGKILL);
    Server next(dir.path, {"--topology", "1C"});  // nor is there room for its index, written anew
    for (int family = 0; family < 60; ++family) next.prompt(family);
    for (int family = 0; family < 4; ++family) CHECK(next.prompt(family) == said[size_t(family)]);
    CHECK(next.disk_hits() > 0);
    INFO(next.log());
    CHECK(count(next.log(), "No space left on device; no more KV is written there") == 1);
  }
}

}  // namespace
}  // namespace xpyd::testing::disk_keep_test
