// The program itself, as a process of the test's own. XPYD_BIN names it, and `make test` sets that.
#pragma once

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

#define NEEDS_PROGRAM() \
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set")

namespace xpyd::testing {

using Words = std::vector<std::string>;

inline std::string read_all(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

inline size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// Waits until `done` holds, and returns whether it does. The bound only ends a hang.
template <class Done>
bool until(double seconds, Done done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

inline Reply get(int port, const std::string& path) {
  Client client(port);
  client.send(request_text("GET", path, ""));
  return client.read();
}
inline Reply post(int port, const std::string& path, const std::string& body) {
  Client client(port);
  client.send(request_text("POST", path, body));
  return client.read();
}

// Processes whose parent is `parent`, by number.
inline std::set<pid_t> children_of(pid_t parent) {
  std::set<pid_t> all;
  std::error_code gone;
  for (auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(parent) + "/task", gone)) {
    std::ifstream children(task.path() / "children");
    for (pid_t child; children >> child;) all.insert(child);
  }
  return all;
}

// Writes a folder with a model of random weights, enough for a server without ../shared.
inline void write_dummy_model(const std::string& dir, int hidden = 64) {
  std::filesystem::create_directories(dir);
  std::ofstream(dir + "/config.json") << R"({"architectures":["LlamaForCausalLM"],"model_type":"llama",
    "hidden_act":"silu","intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
    "vocab_size":256,"max_position_embeddings":4096,"rms_norm_eps":1e-5,"rope_theta":10000.0,
    "tie_word_embeddings":false,"hidden_size":)"
                                      << hidden << "}";
}

struct ProgramHow {
  std::map<std::string, std::string> environment = {};
  std::string folder = "", shell = "";  // where it runs; a line of /bin/sh that comes before it
  bool session = false;                 // one of its own, at addresses that are the same each time
  int stderr_fd = -1;                   // another one than the log
};

// `dir`/log is the program's stderr, `dir`/out its stdout, and `dir`/tmp its TMPDIR, in which nothing may be left. The
// folder is removed with this object.
class Program {
 public:
  using How = ProgramHow;
  explicit Program(Words words, How how = {}) {
    const auto absolute = [](const std::string& path) { return std::filesystem::absolute(path).string(); };
    std::filesystem::create_directories(dir.path + "/tmp");
    const std::string binary = absolute(std::getenv("XPYD_BIN"));
    words.insert(words.begin(), binary);
    if (!how.shell.empty()) {
      std::string line = how.shell + " exec";
      for (const std::string& word : words) line += " '" + word + "'";
      words = {"/bin/sh", "-c", line};
    }
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    how.environment.try_emplace("TMPDIR", absolute(dir.path + "/tmp"));
    const std::string log = dir.path + "/log", out = dir.path + "/out";
    int begun[2];  // its end tells that the program runs, without this process's signal handlers
    REQUIRE(pipe2(begun, O_CLOEXEC) == 0);
    pid = fork();
    if (pid == 0) {
      if (how.session) setsid(), personality(ADDR_NO_RANDOMIZE);
      dup2(how.stderr_fd >= 0 ? how.stderr_fd : open(log.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 2);
      dup2(open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 1);
      close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);  // the program does not get this process's files
      for (const auto& [name, value] : how.environment) setenv(name.c_str(), value.c_str(), 1);
      if (how.folder.empty() || chdir(how.folder.c_str()) == 0) execv(argv[0], argv.data());
      _exit(127);
    }
    close(begun[1]);
    char none;
    CHECK(read(begun[0], &none, 1) == 0);
    close(begun[0]);
  }
  ~Program() {
    const std::set<pid_t> left = children();
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (pid_t child : left) kill(child, SIGKILL);
  }
  Program(const Program&) = delete;

  std::string log() const { return read_all(dir.path + "/log"); }
  std::string out() const { return read_all(dir.path + "/out"); }
  // Waits until the log has said it. Returns false if the program has ended without it, or hangs.
  bool said(const std::string& what) {
    until(60, [&] { return has(log(), what) || ended(); });
    return has(log(), what);
  }
  // The port that it says it listens on; 0: it never does.
  int port() {
    const std::string mark = " on http://127.0.0.1:";
    until(60, [&] {
      const std::string text = log();
      const size_t at = text.find(mark);
      return (at != text.npos && text.find('\n', at) != text.npos) || ended();
    });
    const std::string text = log();
    const size_t at = text.find(mark);
    return at == text.npos ? 0 : std::atoi(text.c_str() + at + mark.size());
  }
  bool ended() {
    siginfo_t info{};
    return pid < 0 || (waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid);
  }
  // Sends signal `number` (0: none). Returns the exit code, or 128 and the number of the signal that ended it; -1: it
  // hangs.
  int end(int number = 0) {
    if (number) signal(number);
    if (!until(60, [&] { return ended(); })) return -1;
    int status = 0;
    waitpid(std::exchange(pid, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  void signal(int number) const { kill(pid, number); }
  std::set<pid_t> children() const { return children_of(pid); }
  // The worker of a role, by its command line; -1: none.
  pid_t worker(const std::string& role) const {
    for (pid_t child : children())
      if (has(read_all("/proc/" + std::to_string(child) + "/cmdline"), std::string("--role") + '\0' + role + '\0'))
        return child;
    return -1;
  }
  size_t files_left() const {
    size_t n = 0;
    for ([[maybe_unused]] auto& file : std::filesystem::directory_iterator(dir.path + "/tmp")) ++n;
    return n;
  }

  TempDir dir;
  pid_t pid = -1;
};

// A program that ends by itself.
struct Ran {
  int code;
  std::string out, err;
};
inline Ran run_program(Words words, Program::How how = {}) {
  Program program(std::move(words), std::move(how));
  const int code = program.end();
  return {code, program.out(), program.log()};
}

// The words of `xpyd serve` for a small model of random weights.
inline Words serve_words(const std::string& model, const Words& more, int hidden = 64) {
  write_dummy_model(model, hidden);
  Words words = {"serve", std::filesystem::absolute(model).string(), "--load-format", "dummy", "--threads", "1"};
  words.insert(words.end(), more.begin(), more.end());
  for (const auto& [option, value] : {std::pair("--port", "0"), {"--kv-bytes", "2MiB"}, {"--max-batch", "4"}})
    if (std::find(words.begin(), words.end(), option) == words.end()) words.insert(words.end(), {option, value});
  return words;
}
struct Served {
  TempDir folder;
};
class Server : Served, public Program {
 public:
  explicit Server(const Words& more, How how = {}, int hidden = 64)
      : Program(serve_words(Served::folder.path + "/model", more, hidden), std::move(how)) {}
  std::string model() const { return Served::folder.path + "/model"; }
};

}  // namespace xpyd::testing
