// Tests the server as a user starts it: a process, a port, signals, and its output on stderr.

#include "tests/json.h"
#include "tests/program.h"

namespace xpyd::testing::serve_test {

namespace fs = std::filesystem;

std::string completion(int max_tokens, bool stream = false) {
  return R"({"prompt":[1,2,3],"ignore_eos":true,"temperature":0,"max_tokens":)" + std::to_string(max_tokens) +
         (stream ? R"(,"stream":true})" : "}");
}

TEST_CASE("serve: SIGTERM lets a stream finish, refuses new work and exits 0", "[serve]") {
  NEEDS_PROGRAM();
  Server server({"--topology", "1P1D"});
  const int port = server.port();
  REQUIRE(port > 0);
  Client client(port);
  client.send(request_text("POST", "/v1/completions", completion(500, true), "Connection: close\r\n"));
  std::string text = client.read_some();
  while (!has(text, "data: ")) text += client.read_some();
  server.signal(SIGTERM);
  for (std::string more; !(more = client.read_some()).empty();) text += more;
  CHECK(has(text, "data: [DONE]"));
  CHECK(count(text, "\"finish_reason\":\"length\"") == 1);
  CHECK(server.end() == 0);
  CHECK(has(server.log(), "logits hash"));
  CHECK_FALSE(Client::connects(port));
}

json stats_of(int port) {
  const std::string body = get(port, "/stats").body;
  CHECK(!has(body, "204,205"));  // tokens of the prompt
  CHECK(!has(body, "secret-folder"));
  return parsed(body);
}

template <class F>
json wait_for_stats(int port, F&& good) {
  json stats;
  const bool came = until(60, [&] { return good(stats = stats_of(port)); });
  INFO(stats.dump());
  REQUIRE(came);
  return stats;
}

TEST_CASE("serve: resident memory equals the sum that info prints, from the first moment", "[serve]") {
  NEEDS_PROGRAM();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  SKIP_TEST("a sanitizer's own memory hides the difference");
#else
  for (const char* kv_bytes : {"32MiB", "96MiB"}) {
    // One block per sequence keeps the bookkeeping beside the pool negligible.
    Server server({"--topology", "1P1D", "--allocator", "contiguous", "--kv-bytes", kv_bytes}, {}, 512);
    REQUIRE(server.port() > 0);
    long total = 0, resident = 0;
    std::ifstream("/proc/" + std::to_string(server.pid) + "/statm") >> total >> resident;
    resident *= sysconf(_SC_PAGESIZE);
    // Weights count once, the pool for each instance.
    const std::string path = server.dir.path + "/info.json";
    REQUIRE(run_program({"info", server.model(), "--kv-bytes", kv_bytes, "--json", path, "--max-batch", "4"}).code ==
            0);
    const json info = parsed_file(path);
    long pool = 0;
    for (auto& scheme : info["pools"])
      if (scheme["scheme"] == "contiguous") pool = scheme["blocks"].get<long>() * scheme["block_bytes"].get<long>();
    REQUIRE(pool > 0);
    const long planned = info["weight_bytes"]["f32"].get<long>() + 2 * pool;
    INFO(resident << " bytes resident, " << planned << " planned");
    CHECK(resident > planned);
    CHECK(resident < planned + (28 << 20));  // the activations of two instances, and the program itself
  }
#endif
}

TEST_CASE("serve: /stats has the blocks, the last answers and the switches, and no prompt", "[serve][page]") {
  NEEDS_PROGRAM();
  for (const auto& [topology, processes] : {std::pair("1P1D", false), {"1C", false}, {"1P1D", true}}) {
    INFO(topology << (processes ? " as processes" : " as threads"));
    TempDir dir;
    fs::create_directory(dir.path + "/secret-folder");
    Words words = {"--topology", topology, "--block-tokens", "2",
                   "--kv-bytes", "20MiB",  "--event-log",    fs::absolute(dir.path).string() + "/secret-folder/log"};
    if (processes) words.push_back("--processes");
    Server server(words, {}, 512);  // a token takes a while
    const int port = server.port();
    REQUIRE(port > 0);
    const bool split = topology == std::string("1P1D");
    Client client(port);
    client.send(request_text("POST", "/v1/completions",
                             R"({"prompt":[200,201,202,203,204,205,206],"ignore_eos":true,"max_tokens":4000,)"
                             R"("temperature":0,"stream":true})"));
    for (std::string text; !has(text, "data: ");) text += client.read_some();
    json stats = wait_for_stats(port, [&](const json& s) {
      return std::any_of(s["instances"].begin(), s["instances"].end(), [&](const json& i) {
        return i["name"] == (split ? "D0" : "C0") && i["blocks"]["active"] > 10;
      });
    });
    const auto answer = [](const json& s) { return s["answers"][0]; };
    CHECK_SAME(answer(stats)["finish"], "");
    CHECK(answer(stats)["prompt"] == 7);
    CHECK(answer(stats)["us"]["decode"] > 0);
    // A step takes longer than two messages. What a process says of its times is off by a message's way.
    if (!processes) CHECK(answer(stats)["us"]["prefill"] > 20);
    const uint64_t id = answer(stats)["request"];
    for (const json& i : stats["instances"]) {
      const json& b = i["blocks"];
      CHECK(b["capacity"] == 2560);
      CHECK(b["free"].get<int>() + b["active"].get<int>() + b["cached"].get<int>() + b["in_transfer"].get<int>() ==
            2560);
    }
    client.close();
    stats = wait_for_stats(port, [&](const json& s) { return answer(s)["finish"] != ""; });
    CHECK_SAME(answer(stats)["finish"], "abort");
    CHECK(answer(stats)["request"] == id);

    CHECK(post(port, "/v1/completions", completion(8)).status == 200);
    stats = stats_of(port);
    const json a = answer(stats);
    REQUIRE(stats["answers"].size() == 2);
    CHECK_SAME(a["finish"], "length");
    CHECK_SAME(a["prefill"], split ? "P0" : "C0");
    CHECK_SAME(a["decode"], split ? "D0" : "C0");
    CHECK((a["prompt"] == 3 && a["output"] == 8 && a["attempts"] == 1 && a["ttft_us"] > 0));
    const json& switches = stats["switches"];
    for (const std::string& expected :
         {std::string(R"(["topology",")") + topology + R"(",true])", std::string(R"(["event-log","given",true])"),
          std::string(R"(["allocator","paged",false])"), std::string(R"(["api-key-file","",false])"),
          std::string(processes ? R"(["transport","shm",false])" : R"(["transport","local",false])")}) {
      INFO(expected);
      CHECK(std::find(switches.begin(), switches.end(), parsed(expected)) != switches.end());
    }
  }
}

TEST_CASE("issue: a server whose stderr is closed at the other end keeps running", "[issues][log]") {
  NEEDS_PROGRAM();
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  close(ends[0]);
  const int port = free_port();
  Server server({"--topology", "1C", "--port", std::to_string(port)}, {.stderr_fd = ends[1]});
  close(ends[1]);
  REQUIRE(until(60, [&] { return Client::connects(port) || server.ended(); }));
  CHECK(post(port, "/v1/completions", completion(1)).status == 200);
  CHECK(server.end(SIGTERM) == 0);
}

TEST_CASE("issue: workers ignore XPYD_CONFIG, so a server with processes starts", "[issues][attack]") {
  NEEDS_PROGRAM();
  TempDir dir;
  const std::string config = fs::absolute(dir.path).string() + "/config";
  std::ofstream(config) << "port = 0\nprocesses = on\nkv-bytes = 2MiB\nthreads = 1\n";
  Program server({"serve"}, {.environment = {{"XPYD_CONFIG", config}, {"XPYD_REQUEST_TIMEOUT", "5"}}});
  const int port = server.port();
  INFO(server.log());
  CHECK(port > 0);
  CHECK(has(server.log(), "worker: D0"));
  CHECK(server.end(SIGTERM) == 0);
}

}  // namespace xpyd::testing::serve_test
