// The server as a user starts it: a process, a port, signals. XPYD_BIN names it; `make test` sets that.

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "experiments/event_log/replay.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::serve_test {
namespace {

// A dummy-weights model folder: enough for a server without ../shared.
void write_dummy_model(const std::string& dir, int hidden = 64) {
  std::ofstream(dir + "/config.json") << R"({"architectures":["LlamaForCausalLM"],"model_type":"llama",
    "hidden_act":"silu","hidden_size":)"
                                      << hidden << R"(,"intermediate_size":128,"num_hidden_layers":2,
    "num_attention_heads":4,"num_key_value_heads":2,"vocab_size":256,"max_position_embeddings":4096,
    "rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":false})";
}

class Server {
 public:
  Server(const std::string& dir, std::vector<std::string> words) : log_(dir + "/log") {
    words.insert(words.begin(), {std::getenv("XPYD_BIN"), "serve", dir, "--load-format", "dummy"});
    if (std::find(words.begin(), words.end(), "--kv-bytes") == words.end())
      words.insert(words.end(), {"--kv-bytes", "8MiB"});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    child_ = fork();
    if (child_ == 0) {
      dup2(open(log_.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
  }
  ~Server() {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
  }
  // The port that it says it listens on; 0 when it never does.
  int port() {
    for (int i = 0; i < 600; ++i) {
      std::string text = log();
      size_t at = text.find("on http://127.0.0.1:");
      if (at != text.npos && text.find('\n', at) != text.npos) return std::atoi(text.c_str() + at + 20);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return 0;
  }
  long resident_bytes() const {
    std::ifstream statm("/proc/" + std::to_string(child_) + "/statm");
    long total = 0, resident = 0;
    statm >> total >> resident;
    return resident * sysconf(_SC_PAGESIZE);
  }
  void signal(int number) { kill(child_, number); }
  int wait() {
    int status = 0;
    waitpid(child_, &status, 0);
    child_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string log() const {
    std::stringstream text;
    text << std::ifstream(log_).rdbuf();
    return text.str();
  }

 private:
  std::string log_;
  pid_t child_;
};

int connect_to(int port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

void send_completion(int fd, int max_tokens, bool stream) {
  std::string body = R"({"prompt":[1,2,3],"ignore_eos":true,"temperature":0,"max_tokens":)" +
                     std::to_string(max_tokens) + (stream ? R"(,"stream":true})" : "}");
  std::string request =
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Connection: close\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body;
  REQUIRE(write(fd, request.data(), request.size()) == ssize_t(request.size()));
}

std::string read_until(int fd, const std::string& mark) {
  std::string text;
  char buffer[4096];
  while (mark.empty() || text.find(mark) == text.npos) {
    ssize_t n = read(fd, buffer, sizeof buffer);
    if (n <= 0) break;
    text.append(buffer, size_t(n));
  }
  return text;
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST_CASE("serve: SIGTERM lets a stream finish, refuses new work and exits 0", "[serve]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  TempDir dir;
  write_dummy_model(dir.path);
  Server server(dir.path, {"--port", "0", "--topology", "1P1D"});
  int port = server.port();
  REQUIRE(port > 0);
  int fd = connect_to(port);
  REQUIRE(fd >= 0);
  send_completion(fd, 1500, true);
  std::string text = read_until(fd, "data: ");
  server.signal(SIGTERM);
  text += read_until(fd, "");
  close(fd);
  CHECK(text.find("data: [DONE]") != text.npos);
  CHECK(count(text, "\"finish_reason\":\"length\"") == 1);
  CHECK(server.wait() == 0);
  CHECK(server.log().find("logits hash") != std::string::npos);
  CHECK(connect_to(port) < 0);
}

// Decisions in the logs of a run, by kind; none differs.
std::map<std::string, int64_t> decisions(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path().string());
  std::map<std::string, int64_t> all{{"files", int64_t(paths.size())}};
  const auto counts = replay(paths, {}, [](const std::string& line, const std::string& now) {
    INFO(line << " now " << now);
    CHECK(false);
  });
  INFO((counts ? "" : counts.error().message));
  REQUIRE(counts.ok());
  for (const auto& [kind, count] : counts.value()) all[kind] = count.decisions;
  return all;
}

TEST_CASE("serve: the event log, of workers as well, and of a server that is killed", "[serve][event_log]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const bool processes : {true, false}) {
    INFO((processes ? "processes" : "killed"));
    TempDir dir, logs;
    write_dummy_model(dir.path);
    std::vector<std::string> words = {"--port", "0", "--topology", "1P1D", "--event-log", logs.path + "/log"};
    if (processes) words.push_back("--processes");
    Server server(dir.path, words);
    const int port = server.port();
    REQUIRE(port > 0);
    for (int i = 0; i < 20; ++i) {
      const int fd = connect_to(port);
      REQUIRE(fd >= 0);
      send_completion(fd, 40, true);
      CHECK(read_until(fd, "[DONE]").find("[DONE]") != std::string::npos);
      close(fd);
    }
    server.signal(processes ? SIGTERM : SIGKILL);
    CHECK(server.wait() == (processes ? 0 : 128 + SIGKILL));
    const auto all = decisions(logs.path);
    CHECK(all.at("files") == (processes ? 3 : 1));
    CHECK(all.at("place") <= 20);
    if (processes) CHECK(all.at("place") == 20);
    CHECK(all.at("order") > 10);  // of one that was killed the last are missing
    CHECK(all.at("plan") > 20 * 20);
  }
}

TEST_CASE("serve: a port in use is named", "[serve]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  TempDir first_dir, second_dir;
  write_dummy_model(first_dir.path);
  write_dummy_model(second_dir.path);
  Server first(first_dir.path, {"--port", "0"});
  int port = first.port();
  REQUIRE(port > 0);
  Server second(second_dir.path, {"--port", std::to_string(port)});
  CHECK(second.wait() != 0);
  CHECK(second.log().find(std::to_string(port)) != std::string::npos);
  CHECK(second.log().find("in use") != std::string::npos);
}

TEST_CASE("serve: what cannot work is said before anything listens", "[serve]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  struct Case {
    std::vector<std::string> words;
    const char* says;
  } cases[] = {{{"--topology", "1P"}, "P and D need each other"},
               {{"--topology", "x"}, "1P1D"},
               {{"--kv-bytes", "100"}, "kv-bytes"},
               {{"--max-model-len", "5000"}, "--max-model-len"},
               {{"--pin", "on", "--topology", "9C", "--threads", "99"}, "--pin"},
               {{"--gemm", "nonesuch"}, "--gemm"},
               {{"--attention", "nonesuch"}, "--attention"}};
  for (Case& c : cases) {
    INFO(c.says);
    TempDir dir;
    write_dummy_model(dir.path);
    c.words.insert(c.words.end(), {"--port", "0"});
    Server server(dir.path, c.words);
    CHECK(server.wait() == 2);
    CHECK(server.log().find(c.says) != std::string::npos);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Of a 1P1D server with --allocator contiguous: weights once, and of each instance pool and scratch.
long planned_bytes(const std::string& dir, const std::string& kv_bytes) {
  std::string json = dir + "/info.json";
  std::string command = std::getenv("XPYD_BIN") + (" info " + dir) + " --kv-bytes " + kv_bytes + " --json " + json +
                        " >" + dir + "/info.txt 2>&1";
  REQUIRE(std::system(command.c_str()) == 0);
  auto info = parsed_file(json);
  auto& scratch = info["scratch"][0];
  REQUIRE(scratch["batching"] == "chunked");
  long pool = 0;
  for (auto& scheme : info["pools"])
    if (scheme["scheme"] == "contiguous") pool = scheme["blocks"].get<long>() * scheme["block_bytes"].get<long>();
  REQUIRE(pool > 0);
  return info["weight_bytes"]["f32"].get<long>() +
         2 * (pool + scratch["activation_bytes"].get<long>() + scratch["logits_bytes"].get<long>());
}
#endif

TEST_CASE("serve: resident memory is what info adds up, from the first moment", "[serve]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  SKIP_TEST("a sanitizer's own memory hides the difference");
#else
  for (const char* kv_bytes : {"32MiB", "96MiB"}) {
    TempDir dir;
    write_dummy_model(dir.path, 1024);
    // One block per sequence, so that the bookkeeping beside the pool does not count.
    Server server(dir.path, {"--port", "0", "--allocator", "contiguous", "--kv-bytes", kv_bytes});
    REQUIRE(server.port() > 0);
    long resident = server.resident_bytes(), planned = planned_bytes(dir.path, kv_bytes);
    INFO(resident << " bytes resident, " << planned << " planned");
    CHECK(resident > planned);
    CHECK(resident < planned + (14 << 20));  // the program itself, and what libcrypto relocates
  }
#endif
}

json stats_of(int port) {
  const int fd = connect_to(port);
  const std::string request = "GET /stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  REQUIRE(write(fd, request.data(), request.size()) == ssize_t(request.size()));
  const std::string text = read_until(fd, "");
  close(fd);
  REQUIRE(text.find("\r\n\r\n") != text.npos);
  CHECK(text.find("204,205") == text.npos);  // of the prompt
  CHECK(text.find("secret-folder") == text.npos);
  return parsed(text.substr(text.find("\r\n\r\n") + 4));
}

template <class F>
json wait_for_stats(int port, F&& good) {
  json stats = stats_of(port);
  for (int i = 0; i < 600 && !good(stats); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stats = stats_of(port);
  }
  INFO(stats.dump());
  REQUIRE(good(stats));
  return stats;
}

// Of one instance: cells, and blocks by state as its map has them.
std::array<int, 5> sums(const json& map) {
  std::array<int, 5> all = {};
  for (const json& run : map["cells"]) {
    all[0] += run[0].get<int>();
    for (size_t s = 1; s < 5; ++s) all[s] += run[0].get<int>() * run[s].get<int>();
  }
  return all;
}

TEST_CASE("serve: /stats has the map of blocks, the last answers and the switches", "[serve][page]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  struct Case {
    const char* topology;
    bool processes;
  };
  for (const Case& c : {Case{"1P1D", false}, Case{"1C", false}, Case{"1P1D", true}}) {
    INFO(c.topology << (c.processes ? " as processes" : " as threads"));
    TempDir dir;
    std::filesystem::create_directory(dir.path + "/secret-folder");
    write_dummy_model(dir.path, 512);  // a token takes a while
    std::vector<std::string> words = {
        "--port", "0",          "--topology", c.topology,    "--block-tokens",
        "2",      "--kv-bytes", "20MiB",      "--event-log", dir.path + "/secret-folder/log"};
    if (c.processes) words.push_back("--processes");
    Server server(dir.path, words);
    const int port = server.port();
    REQUIRE(port > 0);
    const size_t n = c.topology == std::string("1C") ? 1 : 2;

    const int fd = connect_to(port);
    const std::string body = R"({"prompt":[200,201,202,203,204,205,206],"ignore_eos":true,"max_tokens":4000,)"
                             R"("temperature":0,"stream":true})";
    const std::string request =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    REQUIRE(write(fd, request.data(), request.size()) == ssize_t(request.size()));
    read_until(fd, "data: ");
    // While it runs: its blocks, all that are active there, and itself.
    json stats = wait_for_stats(port, [&](const json& s) {
      if (!c.processes && !s["instances"][0].contains("map")) return false;
      return std::any_of(s["instances"].begin(), s["instances"].end(), [&](const json& i) {
        if (i["name"] != (n == 2 ? "D0" : "C0")) return false;
        return c.processes ? i["blocks"]["active"] > 10
                           : i.contains("map") && sums(i["map"])[2] > 10 && s["answers"][0]["output"] > 20;
      });
    });
    const auto answer = [](const json& s) { return s["answers"][0]; };
    CHECK_SAME(answer(stats)["finish"], "");
    CHECK(answer(stats)["prompt"] == 7);
    CHECK(answer(stats)["us"]["decode"] > 0);
    const uint64_t id = answer(stats)["request"];
    for (const json& i : stats["instances"]) {
      CHECK(i["blocks"]["capacity"] == 2560);
      REQUIRE(i.contains("map") == !c.processes);
      if (c.processes) continue;
      const auto all = sums(i["map"]);
      CHECK(i["map"]["per_cell"] == 3);
      CHECK(all[0] == 854);
      CHECK(all[1] + all[2] + all[3] + all[4] == 2560);
      int holds = 0;
      for (const json& h : i["map"]["requests"]) {
        CHECK(h[1] == id);
        holds += h[2].get<int>();
      }
      CHECK(holds == all[2]);
    }
    close(fd);
    stats = wait_for_stats(port, [&](const json& s) { return answer(s)["finish"] != ""; });
    CHECK_SAME(answer(stats)["finish"], "abort");
    CHECK(answer(stats)["request"] == id);

    const int second = connect_to(port);
    send_completion(second, 8, false);
    read_until(second, "");
    close(second);
    stats = stats_of(port);
    const json a = answer(stats);
    REQUIRE(stats["answers"].size() == 2);
    CHECK(a["request"] > id);
    CHECK_SAME(a["finish"], "length");
    CHECK_SAME(a["prefill"], n == 2 ? "P0" : "C0");
    CHECK_SAME(a["decode"], n == 2 ? "D0" : "C0");
    CHECK(a["prompt"] == 3);
    CHECK(a["output"] == 8);
    CHECK(a["attempts"] == 1);
    int64_t whole = 0;
    for (const json& us : a["us"]) whole += us.get<int64_t>();
    CHECK(a["ttft_us"] > 0);
    CHECK(a["ttft_us"] <= whole);
    CHECK(whole <= a["age_us"].get<int64_t>() + 7);
    // On a busy machine the conductor may read of several phases at once: then one of them took no time.
    for (const json& us : a["us"]) CHECK(us >= 0);
    if (n == 1) CHECK(a["us"]["transfer"] == 0);
    // At rest the map is what the counts say.
    if (!c.processes)
      wait_for_stats(port, [&](const json& s) {
        return std::all_of(s["instances"].begin(), s["instances"].end(), [](const json& i) {
          const json& b = i["blocks"];
          return i.contains("map") && sums(i["map"]) == std::array<int, 5>{854, b["free"], 0, b["cached"], 0};
        });
      });

    const json& switches = stats["switches"];
    const auto has = [&](const char* expected) {
      return std::find(switches.begin(), switches.end(), parsed(expected)) != switches.end();
    };
    CHECK(has((std::string(R"(["topology",")") + c.topology + R"(",true])").c_str()));
    CHECK(has(R"(["event-log","given",true])"));
    CHECK(has(R"(["allocator","paged",false])"));
    CHECK(has(c.processes ? R"(["transport","shm",false])" : R"(["transport","local",false])"));
    CHECK(has(R"(["api-key-file","",false])"));
  }
}

TEST_CASE("serve: 500 silent connections do not disturb a client", "[serve]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  TempDir dir;
  write_dummy_model(dir.path);
  Server server(dir.path, {"--port", "0", "--topology", "1C"});
  int port = server.port();
  REQUIRE(port > 0);
  std::vector<int> silent;
  for (int i = 0; i < 500; ++i) silent.push_back(connect_to(port));
  int fd = connect_to(port);
  REQUIRE(fd >= 0);
  send_completion(fd, 20, false);
  std::string answer = read_until(fd, "");
  CHECK(answer.find("HTTP/1.1 200") == 0);
  CHECK(answer.find("\"completion_tokens\":20") != answer.npos);
  close(fd);
  for (int s : silent) close(s);
  server.signal(SIGTERM);
  CHECK(server.wait() == 0);
}

}  // namespace
}  // namespace xpyd::testing::serve_test
