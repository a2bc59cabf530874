// Every call of a start, a request and a shutdown that may fail, failing once: what the user sees
// is the right text or a clear error, the process does not hang or crash, and nothing stays behind.
// tests/faults/preload.cc makes the calls fail; XPYD_FAULTS names it, XPYD_BIN the program.
//
//   make check STAGE=faults               every call (FAULTS='processes worker' narrows, EVERY=20: a 20th)
//   make test                 a sample of them, other ones each day

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/personality.h>
#include <sys/socket.h>
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

#include "base/json.h"
#include "base/random.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::faults_test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kStart = 20, kAnswer = 20, kEnd = 15;  // seconds: much more than it takes

struct Fault {
  std::string kind;
  std::string at, site;  // one of the two: the n-th call, or the first one from a place
};

struct Scene {
  const char* name;
  const char* in;  // the subcommand whose calls fail
  std::vector<std::string> options;
};

const Scene kScenes[] = {
    {"one-process", "serve", {"--host-kv-bytes", "4MiB", "--disk-kv-bytes", "8MiB", "--disk-kv-dir"}},
    {"processes", "serve", {"--processes", "--lease", "2"}},
    {"worker", "worker", {"--processes", "--lease", "2"}},
    {"processes-tcp", "worker", {"--processes", "--lease", "2", "--transport", "tcp"}},
};

std::string slurp(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

struct Answer {
  int status = 0;  // 0: the connection ended before an answer, or there was none
  bool timed_out = false;
  int port = 0;      // the client's
  std::string text;  // of a completion; or the whole body
};

Answer ask(int port, const std::string& method, const std::string& path, const std::string& body) {
  Answer answer;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  timeval patience{long(kAnswer), 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(uint16_t(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string got;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) {
    sockaddr_in mine{};
    socklen_t bytes = sizeof mine;
    getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &bytes);
    answer.port = ntohs(mine.sin_port);
    const std::string request = method + " " + path +
                                " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                                "Content-Type: application/json\r\nContent-Length: " +
                                std::to_string(body.size()) + "\r\n\r\n" + body;
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) == ssize_t(request.size())) {
      char part[4096];
      ssize_t n;
      while ((n = recv(fd, part, sizeof part, 0)) > 0) got.append(part, size_t(n));
      answer.timed_out = n < 0 && errno == EAGAIN;
    }
  }
  close(fd);
  if (got.rfind("HTTP/1.1 ", 0) == 0) answer.status = std::atoi(got.c_str() + 9);
  const size_t head = got.find("\r\n\r\n");
  if (head != got.npos) answer.text = got.substr(head + 4);
  return answer;
}

// A server in a session and a folder of its own.
class Victim {
 public:
  Victim(const Scene& scene, const Fault& fault, const std::string& list = "") {
    fs::create_directories(dir_.path + "/tmp");
    fs::create_directories(dir_.path + "/disk");
    std::vector<std::string> words{
        std::getenv("XPYD_BIN"), "serve", "--topology", "1P1D", "--port", "0", "--kv-bytes", "2MiB", "--threads", "1"};
    words.insert(words.end(), scene.options.begin(), scene.options.end());
    if (words.back() == "--disk-kv-dir") words.push_back(dir_.path + "/disk");
    const fs::path here = fs::current_path();
    auto absolute = [&](const char* path) { return (here / path).string(); };
    words[0] = absolute(words[0].c_str());
    std::map<std::string, std::string> more{{"LD_PRELOAD", absolute(std::getenv("XPYD_FAULTS"))},
                                            {"TMPDIR", absolute((dir_.path + "/tmp").c_str())},
                                            {"FAULT_IN", scene.in},
                                            {"FAULT_KIND", fault.kind},
                                            {"FAULT_AT", fault.at},
                                            {"FAULT_SITE", fault.site},
                                            {"FAULT_ONCE", absolute((dir_.path + "/once").c_str())}};
    if (!list.empty()) more["FAULT_LIST"] = absolute(list.c_str());
    std::vector<std::string> environment;
    for (char** word = environ; *word; ++word)
      if (!more.contains(std::string(*word).substr(0, std::string(*word).find('=')))) environment.push_back(*word);
    for (const auto& [name, value] : more)
      if (!value.empty()) environment.push_back(name + "=" + value);
    std::vector<char*> argv, envp;
    for (std::string& word : words) argv.push_back(word.data());
    for (std::string& word : environment) envp.push_back(word.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    log_ = dir_.path + "/log";
    pid_ = fork();
    if (pid_ == 0) {
      setsid();
      personality(ADDR_NO_RANDOMIZE);
      dup2(open(log_.c_str(), O_CREAT | O_APPEND | O_WRONLY, 0600), 2);
      dup2(open("/dev/null", O_WRONLY), 1);
      execve(argv[0], argv.data(), envp.data());
      _exit(127);
    }
  }
  ~Victim() {
    if (!ended()) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    for (pid_t pid : session()) kill(pid, SIGKILL);
  }

  bool ended() {
    if (!over_ && waitpid(pid_, &status_, WNOHANG) == pid_) over_ = true;
    return over_;
  }
  bool ended_within(double seconds) {
    return until(seconds, [&] { return ended(); });
  }
  // Its port; 0: it ended; -1: neither.
  int port() {
    int port = -1;
    until(kStart, [&] {
      const std::string text = log();
      const size_t at = text.find("on http://127.0.0.1:");
      if (at != text.npos && text.find('\n', at) != text.npos)
        port = std::atoi(text.c_str() + at + 20);
      else if (ended())
        port = 0;
      return port >= 0;
    });
    return port;
  }
  // "exit code 1", "signal 6"
  std::string how() const {
    return WIFEXITED(status_) ? "exit code " + std::to_string(WEXITSTATUS(status_))
                              : "signal " + std::to_string(WTERMSIG(status_));
  }
  bool clean_exit() const { return WIFEXITED(status_) && WEXITSTATUS(status_) == 0; }
  // It said why: a line of its own after the fault's.
  bool said_why() const {
    const std::string text = log();
    const size_t fault = text.find("fault: ");
    if (fault == text.npos) return false;
    // Of glibc alone: a thread's first object with a destructor, for which it has no other way out.
    if (text.find("Fatal glibc error: failed to register TLS destructor", fault) != text.npos) return true;
    return text.find("\nxpyd", fault) != text.npos &&
           (WIFEXITED(status_) && (WEXITSTATUS(status_) == 1 || WEXITSTATUS(status_) == 2));
  }
  // The call that failed was one upon the connection of this client.
  bool broke_connection(int client_port) const {
    return client_port && log().find("fails, peer port " + std::to_string(client_port) + "\n") != std::string::npos;
  }
  // What its descriptors are, and its workers': "socket:", "anon_inode:", "memfd", or a "file", whatever its name. Once
  // two readings agree: connections are closed a moment after their answers.
  std::multiset<std::string> descriptors() const {
    std::multiset<std::string> before, now = read_descriptors();
    for (int tries = 0; tries < 20 && before != now; ++tries) {
      before = std::move(now);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      now = read_descriptors();
    }
    return now;
  }
  std::multiset<std::string> read_descriptors() const {
    std::multiset<std::string> open;
    std::vector<pid_t> pids = session();
    for (pids.push_back(pid_); !pids.empty(); pids.pop_back()) count_descriptors(pids.back(), open);
    return open;
  }
  static void count_descriptors(pid_t pid, std::multiset<std::string>& open) {
    std::error_code gone;
    for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", gone)) {
      const std::string what = fs::read_symlink(entry.path(), gone).string();
      if (gone) continue;
      open.insert(what.starts_with("/memfd:") ? "memfd"
                  : what.starts_with("/")     ? "file"
                                              : what.substr(0, what.find(':') + 1));
    }
  }
  void terminate() {
    if (!ended()) kill(pid_, SIGTERM);
  }
  std::string log() const { return slurp(log_); }
  // What of it is still there once it has ended.
  std::string left_behind() {
    std::string left;
    until(5, [&] {
      left.clear();
      for (pid_t pid : session()) left += " process " + std::to_string(pid);
      for (const char* folder : {"/tmp", "/disk"})
        for (const auto& entry : fs::directory_iterator(dir_.path + folder))
          left += " " + entry.path().filename().string();
      return left.empty();
    });
    return left;
  }

 private:
  template <class F>
  static bool until(double seconds, F done) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (!done()) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }
  std::vector<pid_t> session() const {  // its processes, itself apart; zombies do not count
    std::vector<pid_t> pids;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const pid_t pid = std::atoi(entry.path().filename().c_str());
      if (pid <= 0 || pid == pid_) continue;
      const std::string stat = slurp(entry.path().string() + "/stat");
      const size_t name = stat.rfind(')');
      if (name == stat.npos) continue;
      std::istringstream fields(stat.substr(name + 1));
      char state;
      int parent, group, session;
      if (fields >> state >> parent >> group >> session && session == pid_ && state != 'Z') pids.push_back(pid);
    }
    return pids;
  }

  TempDir dir_;
  std::string log_;
  pid_t pid_;
  bool over_ = false;
  int status_ = 0;
};

const std::string kCompletion =
    R"({"prompt":"The key of box 17 is amber. What is the key of box 17?","max_tokens":6,"temperature":0})";

std::string text_of(const Answer& answer) {
  if (answer.status != 200) return "";
  const auto body = parse_json(answer.text, "answer");
  return body ? body.value()["choices"][0]["text"].get<std::string>() : "";
}

bool is_error(const Answer& answer) {
  const auto body = parse_json(answer.text, "answer");
  return answer.status >= 400 && body && body.value().contains("error") &&
         !body.value()["error"]["message"].get<std::string>().empty();
}

// Blocks that are neither free nor cached, of all instances, once there are none or 5 s have
// passed; below 0: nobody answers.
double blocks_held(int port, int more_tries = 100) {
  const Answer metrics = ask(port, "GET", "/metrics", "");
  if (metrics.status != 200) return -1;
  std::istringstream lines(metrics.text);
  double held = 0;
  for (std::string line; std::getline(lines, line);)
    if (line.rfind("vllm:kv_blocks{", 0) == 0 &&
        (line.find("\"active\"") != line.npos || line.find("\"in_transfer\"") != line.npos))
      held += std::atof(line.c_str() + line.rfind(' '));
  if (held == 0 || more_tries == 0) return held;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return blocks_held(port, more_tries - 1);
}

// What a scene is without a fault.
struct Sound {
  std::string text;
  std::multiset<std::string> descriptors;  // of the server, after two answers
};

// "" or what is wrong with this answer; its text is another matter.
std::string wrong_answer(const Answer& answer, Victim& victim) {
  if (answer.timed_out) return "no answer";
  if (answer.status == 0 && !victim.broke_connection(answer.port) && !victim.ended_within(kEnd))
    return "the connection ended without an answer, and it was not its call that failed";
  if (answer.status != 200 && answer.status != 0 && !is_error(answer))
    return "an error without a message: " + answer.text;
  return "";
}

// "" or what stays open: more than without a fault, 5 s after the last answer.
std::string leaked(const Victim& victim, const Sound& sound) {
  std::multiset<std::string> more;
  for (int i = 0; i < 100; ++i) {
    more = victim.descriptors();
    for (const std::string& what : sound.descriptors)
      if (auto at = more.find(what); at != more.end()) more.erase(at);
    if (more.empty()) return "";
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  std::string text = "descriptors are left open:";
  for (const std::string& what : more) text += " " + what;
  return text;
}

// "" or what is wrong with what the user sees under this fault.
std::string run(const Scene& scene, const Fault& fault, const Sound& sound) {
  Victim victim(scene, fault);
  auto said = [&](const std::string& what) {
    const std::string log = victim.log();
    return what + "\n" + log.substr(std::min(log.find("fault: "), log.size()));
  };
  const int port = victim.port();
  if (port < 0) return said("start hangs");
  if (port > 0) {
    const Answer first = ask(port, "POST", "/v1/completions", kCompletion);
    if (const std::string wrong = wrong_answer(first, victim); !wrong.empty()) return said(wrong);
    if (first.status == 200 && text_of(first) != sound.text) return said("wrong text " + first.text);
    // It failed once. From now on all is well, or the process has ended and says why; workers may
    // have to be started again.
    Answer second;
    const auto end = Clock::now() + std::chrono::duration<double>(kStart);
    while (!victim.ended()) {
      second = ask(port, "POST", "/v1/completions", kCompletion);
      if (const std::string wrong = wrong_answer(second, victim); !wrong.empty()) return said(wrong);
      if (second.status == 200 || Clock::now() > end) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    if (!victim.ended()) {
      if (text_of(second) != sound.text) return said("still " + std::to_string(second.status) + " " + second.text);
      const double held = blocks_held(port);
      if (held > 0) return said(std::to_string(int(held)) + " blocks are held by nobody");
      if (held < 0 && !victim.ended_within(kEnd)) return said("no metrics");
      if (const std::string left = leaked(victim, sound); !left.empty()) return said(left);
      victim.terminate();
    }
  }
  if (!victim.ended_within(kEnd)) return said("the end hangs");
  if (!victim.clean_exit() && !victim.said_why()) return said("no clear end: " + victim.how());
  if (const std::string left = victim.left_behind(); !left.empty()) return said("left behind:" + left);
  return "";
}

// All faults of a scene: each place that allocates, and each call of the other kinds.
std::vector<Fault> all_faults(const Scene& scene, Sound* sound) {
  TempDir dir;
  const std::string list = dir.path + "/list";
  {
    Victim victim(scene, {}, list);
    const int port = victim.port();
    INFO(victim.log());
    REQUIRE(port > 0);
    sound->text = text_of(ask(port, "POST", "/v1/completions", kCompletion));
    REQUIRE(sound->text != "");
    REQUIRE(text_of(ask(port, "POST", "/v1/completions", kCompletion)) == sound->text);
    REQUIRE(blocks_held(port) == 0);
    sound->descriptors = victim.descriptors();
    REQUIRE(sound->descriptors.size() > 8);
    victim.terminate();
    REQUIRE(victim.ended_within(kEnd));
    REQUIRE(victim.clean_exit());
    REQUIRE(victim.left_behind() == "");
  }
  std::vector<Fault> faults;
  std::map<std::string, long> calls;
  std::ifstream lines(list);
  for (std::string kind, what; lines >> kind >> what;) {
    if (what.size() == 16)
      faults.push_back({kind, "", what});
    else
      calls[kind] = std::max(calls[kind], std::atol(what.c_str()));
  }
  // Reads and maps go by place alone: most of them are the same ones again.
  for (const char* kind : {"open", "write", "socket", "thread"})
    for (long n = 1; n <= calls[kind]; ++n) faults.push_back({kind, std::to_string(n), ""});
  return faults;
}

constexpr const char* kMissing =
    "XPYD_BIN or XPYD_FAULTS is not set: make test sets them, the second in release builds "
    "alone (a sanitizer's own allocator suffers nothing before it)";
bool has_program() {
  const char *binary = std::getenv("XPYD_BIN"), *preloaded = std::getenv("XPYD_FAULTS");
  return binary && *binary && preloaded && *preloaded;
}

void run_faults(size_t at_most) {
  if (!has_program()) SKIP_TEST(kMissing);
  const char* chosen = std::getenv("FAULTS");
  for (const Scene& scene : kScenes) {
    if (chosen && *chosen &&
        (" " + std::string(chosen) + " ").find(" " + std::string(scene.name) + " ") == std::string::npos)
      continue;
    Sound sound;
    std::vector<Fault> faults = all_faults(scene, &sound);
    REQUIRE(faults.size() > 100);
    const char* every = std::getenv("EVERY");
    const size_t share = every && *every ? size_t(std::max(std::atoi(every), 1)) : 1;
    const size_t n = std::min(at_most, faults.size() / share);
    Random random(uint64_t(std::time(nullptr) / 86400));
    for (size_t i = 0; i < n; ++i) std::swap(faults[i], faults[i + random.below(faults.size() - i)]);
    size_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
      const Fault& fault = faults[i];
      const std::string wrong = run(scene, fault, sound);
      INFO(scene.name << ", " << fault.kind << " " << fault.at << fault.site);
      bad += !wrong.empty();
      CHECK(wrong == "");
    }
    std::fprintf(stderr, "faults, %s: %zu of %zu calls failed once, %zu badly\n", scene.name, n, faults.size(), bad);
  }
}

}  // namespace

TEST_CASE("faults: a sample of calls that fail once", "[faults]") { run_faults(6); }
TEST_CASE("issue: an allocation that failed before main() ended without a word", "[faults]") {
  if (!has_program()) SKIP_TEST(kMissing);
  for (const char* n : {"2", "3", "4"}) CHECK(run(kScenes[0], {"alloc", n, ""}, {}) == "");
}
TEST_CASE("faults: every call of a start, a request and a shutdown fails once", "[.][all-faults]") {
  run_faults(size_t(-1));
}

}  // namespace xpyd::testing::faults_test
