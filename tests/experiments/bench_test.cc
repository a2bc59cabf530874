#include "experiments/load/bench.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <utility>

#include "base/json/json.h"
#include "experiments/subcommands.h"
#include "server/build.h"
#include "server/cli/commands.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/fake_server.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::bench_test {

using nlohmann::json;
using testing::FakeRequest;
using testing::FakeServer;

RequestRecord record(double sent_s, std::vector<double> chunks, int input, int output) {
  RequestRecord r;
  r.due_s = sent_s;
  r.sent_s = sent_s;
  r.end_s = chunks.empty() ? sent_s + 1 : chunks.back() + 0.001;
  r.chunk_s = std::move(chunks);
  r.input_tokens = input;
  r.output_tokens = output;
  r.has_usage = true;
  return r;
}

// Three answers and a failure, on a clock that begins at 100 s.
std::vector<RequestRecord> synthetic() {
  std::vector<RequestRecord> records = {
      record(100.0, {100.1, 100.2, 100.4}, 10, 3),                // TTFT 100, TPOT 150, E2EL 400
      record(100.5, {100.7}, 20, 1),                              // TTFT 200, no TPOT, E2EL 200
      record(101.0, {101.3, 101.4, 101.5, 101.6, 102.3}, 30, 5),  // TTFT 300, TPOT 250, E2EL 1300
      record(100.2, {100.9}, 1000, 1000)};
  records[2].due_s = 100.96;  // 40 ms late
  records[3].error = "HTTP 503";
  return records;
}

// Rounds to a thousandth.
json rounded(json value) {
  if (value.is_number_float()) return std::round(value.get<double>() * 1e3) / 1e3;
  if (value.is_structured())
    for (json& part : value) part = rounded(part);
  return value;
}

TEST_CASE("bench: metrics follow from time stamps, under vLLM's keys", "[bench]") {
  auto goodput = parse_goodput("ttft:201 tpot:200");
  REQUIRE(goodput);
  BenchResult r = summarize_bench(synthetic(), 100, 4, goodput.value());
  // TTFTs are 100, 200 and 300, TPOTs 150 and 250, and pooled gaps 100 200 100 100 100 700. The failed request is in no
  // sum and no sample. A one-token answer meets any TPOT, so two of four are good.
  json all = bench_json(r);
  all.update(bench_details(synthetic(), 100));
  CHECK_SAME(rounded(all), parsed_file(data_path("bench.json")));
  CHECK(r.max_output_tokens_per_s == 4);  // [100, 101): 4, [101, 102): 4, [102, 103): 1
  CHECK(summarize_bench({}, 0, 0, Goodput()).request_throughput == 0);
}

TEST_CASE("bench: a request's TBT is the mean of its longest tenth of gaps", "[bench]") {
  std::vector<double> chunks = {100};
  for (int i = 1; i <= 20; ++i) chunks.push_back(chunks.back() + (i == 4 ? 0.5 : i == 9 ? 0.3 : 0.01));
  const std::vector<RequestRecord> records = {record(100, chunks, 5, 21), record(100, {100.2}, 5, 1),
                                              record(100, {100.1, 100.6}, 5, 2)};
  BenchResult r = summarize_bench(records, 100, 4, parse_goodput("tbt:450").value());
  CHECK(r.request_goodput == Approx(0.5));  // 400 ms and a one-token answer are good, 500 ms is not
  CHECK(r.tbt_ms.count == 2);
  CHECK(r.tbt_ms.min == Approx(400));  // two gaps of twenty
  CHECK(r.tbt_ms.max == Approx(500));
  CHECK(r.tbt_max_ms.min == Approx(500));
  CHECK(r.tbt_p99_ms.min == Approx(500 - 0.19 * 200));
  CHECK(summarize_bench(records, 100, 4, parse_goodput("tbt:399").value()).request_goodput == Approx(0.25));
}

TEST_CASE("bench: goodput limits are parsed, and bad ones refused", "[bench]") {
  auto g = parse_goodput(" ttft:200   e2el:1.5 ");
  REQUIRE(g);
  CHECK(g.value().given);
  CHECK(g.value().ttft_ms == 200);
  CHECK(g.value().e2el_ms == 1.5);
  CHECK(std::isinf(g.value().tpot_ms));
  CHECK_FALSE(parse_goodput("").value().given);
  for (const char* bad : {"ttft", "ttft:x", "ttft:0", "ttft:nan", "itl:5", "ttft=5", "ttft:1 ttft:2", "ttft:5ms"}) {
    INFO(bad);
    CHECK_FALSE(parse_goodput(bad));
  }
}

// Feeds one answer as bytes with time stamps.
RequestRecord answer(const std::vector<std::pair<double, std::string>>& pieces, int status = 200,
                     const std::string& error = "", const std::string& retry_after = "") {
  RequestRecord r;
  r.input_tokens = 7;
  AnswerReader reader(r, true);
  for (const auto& [time, bytes] : pieces) reader.feed(status, bytes, time);
  reader.finish({status, "Reason", error, retry_after}, 9);
  return r;
}

TEST_CASE("bench: chunks, usage and errors in a stream are counted as documented", "[bench]") {
  std::string a = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
              usage_chunk = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":5,\"prompt_tokens\":11}}\n\n";
  std::string empty = "data: {\"choices\":[{\"text\":\"\"}],\"usage\":null}\n\n", done = "data: [DONE]\n\n";
  RequestRecord r = answer({{1, empty}, {2, a}, {2.5, usage_chunk}, {3, done}});
  CHECK(r.ok());
  CHECK(r.chunk_s == std::vector<double>{1, 2});  // an empty text counts, the usage event does not
  CHECK(r.output_tokens == 5);
  CHECK(r.input_tokens == 11);
  CHECK(r.has_usage);
  CHECK(r.text == "a");
  CHECK(r.end_s == 9);
  // A chat stream sends its role first, and an empty delta at its end.
  const std::string role = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
                    word = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n",
                    over = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
  const RequestRecord chat = answer({{1, role}, {2, word}, {3, word}, {4, over}, {5, done}});
  CHECK(chat.ok());
  CHECK(chat.chunk_s == std::vector<double>{2, 3});
  CHECK(chat.text == "hihi");
  const auto delta = [](const std::string& fields) { return "data: {\"choices\":[{\"delta\":{" + fields + "}}]}\n\n"; };
  const RequestRecord thought = answer({{1, role},
                                        {2, delta(R"("reasoning_content":"hm","content":null)")},
                                        {3, delta(R"("reasoning":"so")")},
                                        {4, delta(R"("tool_calls":[{"index":0}])")},
                                        {5, delta(R"("reasoning_content":"","tool_calls":[])")},
                                        {6, word},
                                        {7, over + done}});
  CHECK(thought.ok());
  CHECK(thought.chunk_s == std::vector<double>{2, 3, 4, 6});
  CHECK(thought.output_tokens == 4);
  CHECK(thought.text == "hi");
  r = answer({{1, a + a}, {2, done}});
  CHECK(r.ok());
  CHECK(r.output_tokens == 2);  // no usage: chunks
  CHECK_FALSE(r.has_usage);
  CHECK(r.input_tokens == 7);
  r = answer({{1, a.substr(0, 9)}, {4, a.substr(9) + done}});
  CHECK(r.chunk_s == std::vector<double>{4});  // when its last byte arrived

  CHECK(answer({{1, a}}).error == "the stream ended without [DONE]");
  CHECK(answer({{1, done}}).error == "the stream ended without any chunk");
  CHECK(answer({{1, a}, {2, done}}, 200, "cut").error == "cut");
  CHECK(answer({{1, "{\"error\":{\"message\":\"full\"}}"}}, 503).error == "HTTP 503 Reason: full");
  r = answer({{1, "{\"error\":{\"message\":\"ttft\"}}"}}, 429, "", "7");
  CHECK(r.refused);
  CHECK(r.error == "HTTP 429 Reason: ttft");
  CHECK(r.retry_after_s == 7);
  for (const char* none : {"", "soon", "-1", "7s"}) CHECK(answer({}, 429, "", none).retry_after_s == -1);
  CHECK_FALSE(answer({}, 503, "", "7").refused);
  CHECK(answer({{1, "<html>"}}, 502).error == "HTTP 502 Reason");
  CHECK(answer({{1, a + "data: {\"error\":{\"message\":\"died\"}}\n\n" + done}}).error == "error in the stream: died");
  CHECK(answer({{1, "data: {\"error\":{\"message\":\"ttft\",\"code\":\"objective_missed\"}}\n\n" + done}}).refused);
  CHECK(answer({{1, ": waiting\n\n" + a}, {2, ": waiting\n\n" + done}}).ok());
  CHECK_FALSE(answer({{1, "data: {bad\n\n" + done}}).ok());
}

// --- against a scripted server ---

struct Script {
  std::atomic<int> answered{0}, most_in_flight{0};
  int fail_every = 0;            // every n-th completion is a 503
  int refuse_every = 0;          // … a 429
  int delay_ms = 0;              // before a chunk
  std::atomic<int> together{0};  // answers wait until so many requests are open
  int tokens_per_answer = 0;     // 0: as requested
  std::mutex mutex;
  std::condition_variable came;
  int in_flight = 0;         // guarded by mutex
  std::vector<json> bodies;  // of completions, guarded by mutex

  // Returns the bodies and forgets them.
  std::vector<json> take_bodies() {
    std::lock_guard lock(mutex);
    return std::exchange(bodies, {});
  }

  void operator()(int fd, const FakeRequest& request) {
    if (request.target == "/v1/models")
      return FakeServer::send_json(
          fd, R"({"data":[{"id":"other"},{"id":"tiny","root":"/m","max_model_len":256,"vocab_size":99}]})");
    json body = parse_json(request.body, "request").value();
    if (request.target == "/tokenize") {
      json tokens = json::array();
      for (size_t i = 0; i < body["prompt"].get<std::string>().size(); ++i) tokens.push_back(1);
      return FakeServer::send_json(fd, json_text({{"tokens", tokens}}));
    }
    bool warm_up = body["prompt"] == "warm up";
    if (!warm_up) {
      std::lock_guard lock(mutex);
      bodies.push_back(body);
    }
    const int n_answered = warm_up ? 0 : ++answered;
    const auto every = [n_answered](int n) { return n && n_answered && n_answered % n == 0; };
    if (every(fail_every))
      return FakeServer::send_json(fd, R"({"error":{"message":"queue full"}})", "503 Service Unavailable");
    if (every(refuse_every))
      return FakeServer::send_json(fd, R"({"error":{"message":"ttft"}})", "429 Too Many Requests\r\nRetry-After: 4");
    if (!warm_up) {
      std::unique_lock lock(mutex);
      most_in_flight = std::max(most_in_flight.load(), ++in_flight);
      came.notify_all();
      came.wait_for(lock, std::chrono::seconds(60), [&] { return most_in_flight >= together; });
    }
    auto chunk = [&](const std::string& data) {
      std::ostringstream out;
      std::string event = "data: " + data + "\n\n";
      out << std::hex << event.size() << "\r\n" << event << "\r\n";
      FakeServer::send_all(fd, out.str());
    };
    FakeServer::send_all(fd, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
    int n = tokens_per_answer ? tokens_per_answer : body["max_tokens"].get<int>();
    for (int i = 0; i < n; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      chunk(R"({"choices":[{"text":"t"}]})");
    }
    if (!warm_up) {
      std::lock_guard lock(mutex);
      --in_flight;  // the client may send the next one once it has seen the end
    }
    chunk(json_text({{"choices", json::array()}, {"usage", {{"completion_tokens", n}}}}));
    chunk("[DONE]");
    FakeServer::send_all(fd, "0\r\n\r\n");
  }
};

struct BenchRun {
  int code;
  json out;
};

BenchRun run_bench(const FakeServer& server, std::vector<std::string> words) {
  testing::TempDir dir;
  std::string path = dir.path + "/bench.json";
  for (const std::string& word : std::vector<std::string>{"--url", server.url(), "--json", path, "--model", "tiny"})
    words.push_back(word);
  auto options = Options::parse(all_options(), "bench", words, 0);
  INFO((options ? "" : options.error().message));
  REQUIRE(options);
  BenchRun run{0, {}};
  {
    testing::QuietStdout quiet;
    run.code = bench_main(options.value());
  }
  if (auto text = read_small_file(path, 1 << 20)) run.out = testing::parsed(text.value());
  return run;
}

TEST_CASE("bench: random prompts against a server give complete results", "[bench]") {
  Script script;
  FakeServer server([&](int fd, const FakeRequest& request) { script(fd, request); });
  BenchRun run = run_bench(server, {"--requests", "20", "--input-len", "30", "--output-len", "4", "--seed", "5",
                                    "--detailed", "--goodput", "ttft:60000"});
  CHECK(run.code == 0);
  CHECK(run.out["completed"] == 20);
  CHECK(run.out["total_input_tokens"] == 600);
  CHECK(run.out["total_output_tokens"] == 80);
  CHECK(run.out["slo_attainment"] == 1.0);
  CHECK(run.out["run"]["options"]["input-len"] == "30");
  CHECK(run.out["generated_texts"][0] == "tttt");
  CHECK(run.out["itls"][0].size() == 3);
  std::vector<json> bodies = script.take_bodies();
  REQUIRE(bodies.size() == 20);
  for (const json& body : bodies) {
    CHECK(body["model"] == "tiny");
    CHECK(body["stream"] == true);
    CHECK(body["stream_options"]["include_usage"] == true);
    CHECK(body["ignore_eos"] == true);
    CHECK(body["max_tokens"] == 4);
    CHECK(body["prompt"].size() == 30);
    for (const json& id : body["prompt"]) CHECK((id >= 0 && id < 99));
  }
}

TEST_CASE("bench: failures and refusals are counted apart, and only failures change the exit code", "[bench]") {
  for (const bool refused : {false, true}) {
    INFO(refused);
    Script script;
    (refused ? script.refuse_every : script.fail_every) = 3;
    FakeServer server([&](int fd, const FakeRequest& request) { script(fd, request); });
    const BenchRun run = run_bench(server, {"--requests", "12", "--input-len", "3", "--output-len", "2", "--detailed",
                                            "--goodput", "ttft:60000 tbt:60000"});
    CHECK(run.code == (refused ? 0 : 1));
    CHECK(run.out["completed"] == 8);
    CHECK(run.out["failed"] == (refused ? 0 : 4));
    CHECK(run.out["refused"] == (refused ? 4 : 0));
    CHECK(run.out["refused_with_retry_after"] == (refused ? 4 : 0));
    CHECK(run.out["total_output_tokens"] == 16);
    CHECK(run.out["slo_attainment"].get<double>() == Approx(8 / 12.0));
    CHECK(run.out["p99_tbt_worst_tenth_ms"].get<double>() > 0);
    if (refused) CHECK(run.out["mean_retry_after_s"] == 4.0);
    const std::string says = refused ? "HTTP 429 Too Many Requests: ttft" : "HTTP 503 Service Unavailable: queue full";
    CHECK(std::count(run.out["errors"].begin(), run.out["errors"].end(), json(says)) == 4);
  }
}

TEST_CASE("bench: --max-concurrency limits open requests, and the rate sets arrivals", "[bench]") {
  Script script;
  script.together = 3;
  FakeServer server([&](int fd, const FakeRequest& request) { script(fd, request); });
  BenchRun run = run_bench(server,
                           {"--requests", "12", "--input-len", "3", "--output-len", "3", "--max-concurrency", "3"});
  CHECK(run.code == 0);
  CHECK(script.most_in_flight == 3);
  script.together = 0;
  run = run_bench(server, {"--requests", "20", "--input-len", "3", "--output-len", "1", "--rate", "100", "--arrival",
                           "fixed", "--detailed"});
  CHECK(run.out["request_rate"] == 100.0);
  for (size_t i = 0; i < 20; ++i)  // never before it is due
    CHECK(run.out["start_times"][i].get<double>() >= double(i) / 100);
  CHECK(run.out["duration"].get<double>() >= 0.19);
}

TEST_CASE("bench: a session's next turn is sent its delay after the previous answer", "[bench]") {
  Script script;
  script.delay_ms = 30;
  FakeServer server([&](int fd, const FakeRequest& request) { script(fd, request); });
  testing::TempDir dir;
  const std::string trace = dir.path + "/trace.jsonl";
  std::ofstream(trace) << R"({"session_id":1,"timestamp":0,"input_length":20,"output_length":3,"hash_ids":[1,2]}
                             {"session_id":1,"delay":50,"input_length":30,"output_length":1,"hash_ids":[1,3]}
                             {"session_id":2,"timestamp":10,"input_length":10,"output_length":1,"hash_ids":[1]}
                             {"session_id":1,"delay":0,"input_length":31,"output_length":1,"hash_ids":[1,3]})";
  const BenchRun run = run_bench(
      server, {"--dataset", "mooncake", "--dataset-path", trace, "--detailed", "--hash-block-tokens", "16"});
  CHECK(run.code == 0);
  CHECK(run.out["completed"] == 4);
  std::vector<json> bodies = script.take_bodies();
  REQUIRE(bodies.size() == 4);
  std::ranges::sort(bodies, {}, [](const json& body) { return body["prompt"].size(); });
  CHECK(std::equal(bodies[2]["prompt"].begin(), bodies[2]["prompt"].end(), bodies[3]["prompt"].begin()));
  std::map<int, double> sent_s;  // by tokens of the prompt; the first answer takes 90 ms
  for (size_t i = 0; i < 4; ++i) sent_s[run.out["input_lens"][i]] = run.out["start_times"][i];
  REQUIRE(sent_s.size() == 4);
  CHECK(sent_s[10] < sent_s[30]);  // the other session does not wait
  CHECK(sent_s[30] >= 0.14);
  CHECK(sent_s[31] > sent_s[30]);
}

TEST_CASE("bench: a load that the server cannot accept is refused before it starts", "[bench]") {
  Script script;
  FakeServer server([&](int fd, const FakeRequest& request) { script(fd, request); });
  CHECK(run_bench(server, {"--input-len", "250", "--output-len", "7"}).code == 2);  // the context is 256
  CHECK(run_bench(server, {"--goodput", "nonsense"}).code == 2);
  CHECK(run_bench(server, {"--dataset", "mooncake", "--dataset-path", "/none"}).code == 1);
  for (std::vector<std::string> words : {std::vector<std::string>{"--url", "http://127.0.0.1:1"},
                                         {"--url", server.url(), "--model", "absent"},
                                         {"--url", server.url()}}) {  // the first model has no vocab_size
    auto options = Options::parse(all_options(), "bench", words, 0);
    REQUIRE(options);
    CHECK(bench_main(options.value()) != 0);
  }
  CHECK(script.take_bodies().empty());
}

TEST_CASE("bench: an interrupt gives partial results", "[bench]") {
  Script script;
  script.delay_ms = 1;
  FakeServer server([&](int fd, const FakeRequest& request) {
    if (request.target == "/v1/completions" && script.answered == 5) {
      raise(SIGINT);
      char byte;
      if (recv(fd, &byte, 1, 0) <= 0) return;  // no answer: the client goes away
    }
    script(fd, request);
  });
  BenchRun run = run_bench(server,
                           {"--requests", "500", "--input-len", "3", "--output-len", "2", "--max-concurrency", "1"});
  CHECK(run.code == 130);
  CHECK(run.out["completed"] == 5);
  CHECK(run.out["failed"] == 0);
  CHECK(run.out["unanswered"] == 495);
}

}  // namespace xpyd::testing::bench_test
