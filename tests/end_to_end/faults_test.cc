// Lets every call of a start, a request and a shutdown fail once. The user must see the right text or a clear error.
// The process must not hang or crash, and nothing may stay behind. tests/faults/preload.cc makes the calls fail.
// XPYD_FAULTS names that library, and XPYD_BIN the program.
//
// make check STAGE=faults runs every call (FAULTS='processes worker' narrows it, EVERY=20 takes a 20th).
// make check STAGE=slow runs a sample of them, a different one each day.

#include <arpa/inet.h>
#include <sys/socket.h>

#include "base/json/json.h"
#include "base/random.h"
#include "tests/program.h"

namespace xpyd::testing::faults_test {

namespace fs = std::filesystem;
constexpr double kAnswer = 60, kEnd = 60;  // seconds after which a silent process counts as hung

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

struct Answer {
  int status = 0;  // 0: the connection ended before an answer, or there was none
  bool timed_out = false;
  int port = 0;      // of the client
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
      while ((n = TEMP_FAILURE_RETRY(recv(fd, part, sizeof part, 0))) > 0) got.append(part, size_t(n));
      answer.timed_out = n < 0 && errno == EAGAIN;
    }
  }
  close(fd);
  if (got.rfind("HTTP/1.1 ", 0) == 0) answer.status = std::atoi(got.c_str() + 9);
  const size_t head = got.find("\r\n\r\n");
  if (head != got.npos) answer.text = got.substr(head + 4);
  return answer;
}

struct VictimFolder {
  TempDir own;
  std::string path(const char* name) const { return fs::absolute(own.path + name).string(); }
};

// A server in a session and a folder of its own.
class Victim : VictimFolder, public Program {
 public:
  Victim(const Scene& scene, const Fault& fault, const std::string& list = "")
      : Program(words(scene, path("/disk")),
                {.environment = {{"LD_PRELOAD", fs::absolute(std::getenv("XPYD_FAULTS")).string()},
                                 {"FAULT_IN", scene.in},
                                 {"FAULT_KIND", fault.kind},
                                 {"FAULT_AT", fault.at},
                                 {"FAULT_SITE", fault.site},
                                 {"FAULT_LIST", list.empty() ? "" : fs::absolute(list).string()},
                                 {"FAULT_ONCE", path("/once")}},
                 .session = true}),
        leader_(pid) {}
  ~Victim() {
    for (pid_t member : session()) kill(member, SIGKILL);
  }
  static Words words(const Scene& scene, const std::string& disk) {
    fs::create_directories(disk);
    Words words{"serve", "--topology", "1P1D", "--port", "0", "--kv-bytes", "2MiB", "--threads", "1"};
    words.insert(words.end(), scene.options.begin(), scene.options.end());
    if (words.back() == "--disk-kv-dir") words.push_back(disk);
    return words;
  }
  bool ended_within(double seconds) {
    return until(seconds, [&] { return ended(); });
  }
  // True if the log has a line of the program's own behind the fault's line.
  bool said_why(int code) const {
    const std::string text = log();
    const size_t fault = text.find("fault: ");
    if (fault == text.npos) return false;
    return text.find("\nxpyd", fault) != text.npos && (code == 1 || code == 2);
  }
  // True if the failed call was on the connection of this client.
  bool broke_connection(int client_port) const {
    return client_port && has(log(), "fails, peer port " + std::to_string(client_port) + "\n");
  }
  // What is left of it once it has ended.
  std::string left_behind() {
    std::string left;
    until(30, [&] {
      left.clear();
      for (pid_t member : session()) left += " process " + std::to_string(member);
      for (const std::string& folder : {dir.path + "/tmp", path("/disk")})
        for (const auto& entry : fs::directory_iterator(folder)) left += " " + entry.path().filename().string();
      return left.empty();
    });
    return left;
  }

 private:
  std::vector<pid_t> session() const {  // its processes except itself and zombies
    std::vector<pid_t> pids;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const pid_t member = std::atoi(entry.path().filename().c_str());
      if (member <= 0 || member == leader_) continue;
      const std::string stat = read_all(entry.path().string() + "/stat");
      const size_t name = stat.rfind(')');
      if (name == stat.npos) continue;
      std::istringstream fields(stat.substr(name + 1));
      char state;
      int parent, group, session;
      if (fields >> state >> parent >> group >> session && session == leader_ && state != 'Z') pids.push_back(member);
    }
    return pids;
  }

  const pid_t leader_;
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

// Counts the blocks that are neither free nor cached, of all instances. Waits up to 5 s for zero. Negative if nothing
// answers. The first request may fail because the failing call may be on its connection.
double blocks_held(int port, int more_tries = 100) {
  Answer metrics = ask(port, "GET", "/metrics", "");
  if (metrics.status == 0) metrics = ask(port, "GET", "/metrics", "");
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

// Returns "" or what is wrong with this answer, except its text.
std::string wrong_answer(const Answer& answer, Victim& victim) {
  if (answer.timed_out) return "no answer";
  if (answer.status == 0 && !victim.broke_connection(answer.port) && !victim.ended_within(kEnd))
    return "the connection ended without an answer, and it was not its call that failed";
  if (answer.status != 200 && answer.status != 0 && !is_error(answer))
    return "an error without a message: " + answer.text;
  return "";
}

// Returns "" or what is wrong with what the user sees under this fault.
std::string run(const Scene& scene, const Fault& fault, const std::string& text) {
  Victim victim(scene, fault);
  auto said = [&](const std::string& what) {
    const std::string log = victim.log();
    return what + "\n" + log.substr(std::min(log.find("fault: "), log.size()));
  };
  const int port = victim.port();
  if (port == 0 && !victim.ended()) return said("start hangs");
  if (port > 0) {
    const Answer first = ask(port, "POST", "/v1/completions", kCompletion);
    if (const std::string wrong = wrong_answer(first, victim); !wrong.empty()) return said(wrong);
    if (first.status == 200 && text_of(first) != text) return said("wrong text " + first.text);
    // The call has failed once. From now on all must be well, or the process must have ended with a reason. Workers may
    // have to be restarted first.
    Answer second;
    std::string wrong;
    until(kAnswer, [&] {
      if (victim.ended()) return true;
      second = ask(port, "POST", "/v1/completions", kCompletion);
      return !(wrong = wrong_answer(second, victim)).empty() || second.status == 200;
    });
    if (!wrong.empty()) return said(wrong);
    if (!victim.ended()) {
      if (text_of(second) != text) return said("still " + std::to_string(second.status) + " " + second.text);
      const double held = blocks_held(port);
      if (held > 0) return said(std::to_string(int(held)) + " blocks are held by nobody");
      if (held < 0 && !victim.ended_within(kEnd)) return said("no metrics");
      victim.signal(SIGTERM);
    }
  }
  const int code = victim.end();
  if (code < 0) return said("the end hangs");
  if (code != 0 && !victim.said_why(code)) return said("no clear end: exit code " + std::to_string(code));
  if (const std::string left = victim.left_behind(); !left.empty()) return said("left behind:" + left);
  return "";
}

// All faults of a scene, and the text without one: each place that reads or maps, and each call of the other kinds.
std::vector<Fault> all_faults(const Scene& scene, std::string* right) {
  TempDir dir;
  const std::string list = dir.path + "/list";
  {
    Victim victim(scene, {}, list);
    const int port = victim.port();
    INFO(victim.log());
    REQUIRE(port > 0);
    *right = text_of(ask(port, "POST", "/v1/completions", kCompletion));
    REQUIRE(*right != "");
    REQUIRE(text_of(ask(port, "POST", "/v1/completions", kCompletion)) == *right);
    REQUIRE(blocks_held(port) == 0);
    REQUIRE(victim.end(SIGTERM) == 0);
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
  // Reads and maps are identified by place alone, because most of them repeat.
  for (const char* kind : {"open", "write", "socket", "thread"})
    for (long n = 1; n <= calls[kind]; ++n) faults.push_back({kind, std::to_string(n), ""});
  return faults;
}

constexpr const char* kMissing =
    "XPYD_BIN or XPYD_FAULTS is not set: make test sets them, the second in release builds alone";
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
    std::string right;
    std::vector<Fault> faults = all_faults(scene, &right);
    REQUIRE(faults.size() > 80);
    const char* every = std::getenv("EVERY");
    const size_t share = every && *every ? size_t(std::max(std::atoi(every), 1)) : 1;
    const size_t n = std::min(at_most, faults.size() / share);
    Random random(uint64_t(std::time(nullptr) / 86400));
    for (size_t i = 0; i < n; ++i) std::swap(faults[i], faults[i + random.below(faults.size() - i)]);
    size_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
      const Fault& fault = faults[i];
      const std::string wrong = run(scene, fault, right);
      INFO(scene.name << ", " << fault.kind << " " << fault.at << fault.site);
      bad += !wrong.empty();
      CHECK(wrong == "");
    }
    std::fprintf(stderr, "faults, %s: %zu of %zu calls failed once, %zu badly\n", scene.name, n, faults.size(), bad);
  }
}

TEST_CASE("faults: a sample of calls that fail once gives an error or the right text", "[.][slow][faults]") {
  run_faults(6);
}
TEST_CASE("faults: every call of a start, a request and a shutdown that fails once gives an error or the right text",
          "[.][all-faults]") {
  run_faults(size_t(-1));
}

}  // namespace xpyd::testing::faults_test
