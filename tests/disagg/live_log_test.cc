// Event logs of clusters that have served. A replay repeats every decision, and every reading of a log tells what
// happened.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json/json.h"
#include "experiments/event_log/explain.h"
#include "tests/disagg/logged.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::live_log_test {

using nlohmann::json;

json trace_of(const Logged& logged) {
  const std::string file = logged.folder.path + "/trace";
  std::FILE* out = std::fopen(file.c_str(), "w");
  CHECK(write_trace({&logged.path, 1}, out).ok());
  std::fclose(out);
  return parse_json_file(file, {.max_bytes = 1 << 30}).value();
}

// Requests of three families, half of them with two choices, on instances that are threads.
void serve(TinySetup setup, int n, Logged& logged) {
  setup.log = std::exchange(logged.log, nullptr);
  setup.step_tokens = 32;
  TinyCluster tiny(setup);
  for (int i = 0; i < n; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 1 + 17 * (i % 7); ++t) prompt.push_back((t * 5 + i % 3) % 96);
    auto request = tiny_request(uint64_t(i), prompt, 1 + i % 9);
    request->n = 1 + i % 2;
    request->ignore_eos = true;
    request->arrival_s = tiny.clock.now();
    REQUIRE(tiny.submit(request).ok());
  }
  REQUIRE(tiny.cluster->start().ok());
  REQUIRE(tiny.cluster->wait_idle(60));
  // A sender sees a moment later that all has arrived, and then says so.
  const auto sends = [](const auto& instance) { return instance->stats().queue_prefill_sending > 0; };
  while (std::ranges::any_of(tiny.cluster->instances(), sends)) tiny.clock.sleep(0.001);
  tiny.cluster->stop();
}

TEST_CASE("explain: phases and held KV of a request trace are those computed by hand", "[event_log][explain]") {
  const auto seconds = [](const RequestTrace& trace) {
    std::vector<double> all;
    for (double s : attribute(trace)) all.push_back(std::round(s * 1000) / 1000);
    return all;
  };
  RequestTrace trace{.request = 7, .t = 100, .placed = 100.5, .prefill = "P0", .decode = "D1"};
  trace.started = 102, trace.prompt_done = 105, trace.first = 105.001, trace.granted = 105.15, trace.joined = 105.2,
  trace.decoding = 105.3, trace.kv_token_bytes = 1e6, trace.prompt = 1000, trace.cached = 200, trace.output = 100;
  trace.second = 105.4, trace.ended = 109;
  //                            schedule queue fetch prefill grant transfer wait first_decode
  CHECK(seconds(trace) == std::vector<double>{0.5, 1.5, 0, 3, 0.15, 0.05, 0.1, 0.1});
  // P holds 200 to 1000 tokens for 3 s, then 1000 for .2 s. D holds 1000 for .05 s, then 1000 to 1100 for 3.8 s. A
  // token has 1 MB.
  CHECK(held_kv(trace).prefill == Approx(2e9));
  CHECK(held_kv(trace).decode == Approx(4.04e9));
  trace.granted = 104;  // while the prompt was computed
  CHECK(seconds(trace) == std::vector<double>{0.5, 1.5, 0, 3, 0, 0.2, 0.1, 0.1});
  trace.fetching = 100.7, trace.fetched = 101.5;  // while it waited
  CHECK(seconds(trace) == std::vector<double>{0.5, 0.7, 0.8, 3, 0, 0.2, 0.1, 0.1});
  trace.fetched = 103;  // beyond its start: nothing is counted twice
  CHECK(seconds(trace) == std::vector<double>{0.5, 0.2, 1.3, 3, 0, 0.2, 0.1, 0.1});
  trace.fetching = trace.fetched = trace.decoding = 0;  // D's log is missing
  CHECK(seconds(trace) == std::vector<double>{0.5, 1.5, 0, 3, 0, 0.2, 0, 0.2});
  trace.joined = trace.granted = 0, trace.prefill = trace.decode;  // one instance for both
  CHECK(seconds(trace) == std::vector<double>{0.5, 1.5, 0, 3, 0, 0, 0, 0.4});
  CHECK(held_kv(trace).prefill == 0);
  CHECK(held_kv(trace).decode == Approx(6e9));  // 3 s of 200 to 1000 tokens, 4 s of 1000 to 1100
  trace.second = 0;                             // it has one token
  CHECK(seconds(trace) == std::vector<double>{0.5, 1.5, 0, 3, 0, 0, 0, 0.001});
  // With decode_first the KV is there before the first token.
  trace = {.t = 10, .placed = 11, .started = 12, .prompt_done = 14, .joined = 15, .first = 17, .second = 18};
  trace.decoding = 16;
  CHECK(seconds(trace) == std::vector<double>{1, 1, 0, 2, 0, 1, 1, 2});
  // One request is refused, and one is aborted in the queue.
  trace = {.t = 10, .ended = 10.5};
  CHECK(seconds(trace) == std::vector<double>{0, 0, 0, 0, 0, 0, 0, 0});
  trace = {.t = 10, .placed = 11, .started = 12, .ended = 13};
  CHECK(seconds(trace) == std::vector<double>{1, 1, 0, 0, 0, 0, 0, 0});
}

// The Chrome trace event format: each event has what viewers need.
void check_trace(const json& trace) {
  REQUIRE(trace["traceEvents"].is_array());
  std::set<std::pair<int, uint64_t>> named;  // 0 for the process itself
  std::map<uint64_t, int> arrows;
  std::map<std::pair<int, uint64_t>, std::vector<std::pair<double, double>>> tracks;
  for (const json& event : trace["traceEvents"]) {
    INFO(event.dump());
    const std::string ph = event.at("ph");
    const int pid = event.at("pid");
    CHECK(event.at("name").is_string());
    if (ph == "M") {
      const bool process = event["name"] == "process_name";
      CHECK((process || event["name"] == "thread_name"));
      CHECK(event["args"]["name"].is_string());
      CHECK(named.insert({pid, process ? 0 : event.at("tid").get<uint64_t>()}).second);
      continue;
    }
    CHECK(pid > 0);
    CHECK(named.contains({pid, 0}));
    if (ph != "C") CHECK(named.contains({pid, event.at("tid").get<uint64_t>()}));
    CHECK(event.at("ts").is_number());
    if (ph == "X") {
      CHECK(event.at("dur").get<double>() > 0);
      const double begin = event["ts"], end = begin + event["dur"].get<double>();
      tracks[{pid, event.at("tid").get<uint64_t>()}].push_back({begin, end});
    } else if (ph == "C") {
      for (const auto& [name, value] : event.at("args").items()) CHECK(value.is_number());
    } else {
      CHECK((ph == "s" || ph == "f"));
      CHECK(event.contains("cat"));
      arrows[event.at("id").get<uint64_t>()] += ph == "s" ? 1 : -1;
    }
  }
  for (const auto& [id, open] : arrows) CHECK(open == 0);
  // Spans of a track do not overlap, because viewers would drop them.
  for (auto& [track, spans] : tracks) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) CHECK(spans[i].first >= spans[i - 1].second - 1e-3);
  }
}

TEST_CASE("explain, trace: a live run replays, and has instances, transports, requests with their phases, and counters",
          "[event_log][explain][trace][live]") {
  for (const char* disagg : {"prefill_first", "decode_first"}) {
    Logged logged;
    TinySetup setup{.topology = "2P2D"};
    setup.disagg = disagg;
    const bool copies = setup.disagg == "prefill_first";
    setup.decode_copies = copies ? 2 : 1;
    setup.admission = "predicted";
    setup.objectives = {.ttft_s = 1000, .tbt_s = 1000};
    setup.tiers.host_bytes = 1 << 20;
    serve(setup, 30, logged);
    const auto counts = logged.replayed();
    CHECK(counts.at("place").decisions == 30);
    CHECK((counts.contains("order") && counts.contains("admit")));
    CHECK(counts.at("plan").decisions > 30);
    CHECK(logged.traces().size() == 30);
    const json trace = trace_of(logged);
    check_trace(trace);
    std::map<int, std::string> processes;
    std::map<std::string, std::map<std::string, int>> names;  // of events, by process
    for (const json& event : trace["traceEvents"]) {
      const int pid = event["pid"];
      if (event["ph"] == "M") {
        if (event["name"] == "process_name") processes[pid] = event["args"]["name"];
        continue;
      }
      ++names[processes[pid]][event["name"]];
    }
    for (const char* instance : {"P0", "P1", "D0", "D1"}) {
      INFO(instance);
      CHECK(names[instance]["blocks"] > 0);
      CHECK(names[instance]["sequences"] == names[instance]["blocks"]);
      CHECK(names[instance][instance[0] == 'P' ? "prefill" : "decode"] > 0);
      CHECK(names[instance]["swap out"] > 0);
    }
    for (const char* phase : {"queue", "prefill", "transfer", "decode"}) CHECK(names["requests"][phase] > 0);
    std::map<std::string, int> transfers;  // by kind
    for (const auto& [process, events] : names)
      if (process.find(" -> ") != std::string::npos)
        for (const auto& [name, n] : events) transfers[name] += n;
    CHECK(transfers["KV, hand-over"] > 0);
    CHECK((transfers["KV, copy"] > 0) == copies);
  }
}

}  // namespace xpyd::testing::live_log_test
