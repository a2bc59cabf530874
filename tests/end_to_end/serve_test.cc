// The server as a user starts it: a process, a port, signals. XPYD_BIN names it; `make test` sets that.

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

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
    CHECK(resident < planned + (12 << 20));  // the program itself: 6 MiB
  }
#endif
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
