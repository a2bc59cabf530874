// Tests xpyd replay, trace and explain over logs that this process writes.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/json/json.h"
#include "disagg/conductor/event_log.h"
#include "experiments/subcommands.h"
#include "server/build.h"
#include "server/cli/commands.h"
#include "tests/json.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::event_log_commands_test {

struct Ran {
  int code;
  std::string out;
};

Ran run(int (*command)(const Options&), const char* name, std::vector<std::string> words) {
  const auto options = Options::parse(all_options(), name, words, 9);
  REQUIRE(options.ok());
  TempDir dir;
  Ran ran;
  {
    CaughtStdout caught(dir.path + "/out");
    try {
      ran.code = command(options.value());
    } catch (const Error& error) {
      ran.code = server::fail("", error);  // as main() does
    }
  }
  std::ifstream file(dir.path + "/out");
  ran.out = {std::istreambuf_iterator<char>(file), {}};
  return ran;
}

// Placements on two instances, of which the second has the prompt and the first is idle, and a request trace.
std::string write_log(const std::string& path) {
  const auto log = EventLog::create(path, "{}").value();
  for (uint64_t i = 0; i < 4; ++i) {
    const InstanceView instances[] = {
        {.role = Role::colocated}, {.role = Role::colocated, .queued_tokens = 100, .cached_tokens = i < 3 ? 900 : 0}};
    const ClusterView view{.instances = instances, .prompt_tokens = 1000};
    log->decided(1, "place", "least_loaded", i, view, PlacementOptions{},
                 find_placement_policy("least_loaded")->place(view, {}));
  }
  RequestTrace trace{.request = 7, .t = 1, .placed = 1.5, .prefill = "C0", .decode = "C0", .started = 2};
  trace.prompt_done = trace.first = 3, trace.second = 3.25, trace.ended = 4, trace.output = 5;
  log->happened("request", trace);
  log->happened("step", StepTrace{.instance = "C0", .t = 2, .seconds = 1, .tokens = 1000});
  return path;
}

TEST_CASE("replay: decisions that another policy makes differently are printed with their inputs, with exit code 1",
          "[event_log]") {
  TempDir dir;
  const std::string path = write_log(dir.path + "/log");
  Ran ran = run(replay_main, "replay", {path});
  CHECK(ran.code == 0);
  CHECK(ran.out == "place    4 decisions, 0 differ, regret ratio 0.6750, now 0.6750\n");
  ran = run(replay_main, "replay", {path, "--placement", "prefix_aware"});
  CHECK(ran.code == 1);
  int now = 0;
  std::istringstream lines(ran.out);
  for (std::string line; std::getline(lines, line);) now += line == R"(  now: {"prefill":1,"decode":1,"source":-1})";
  CHECK(now == 3);
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{}, {path, "--placement", "nobodys"}, {path + "x"}, {path, path + "x"}})
    CHECK(run(replay_main, "replay", wrong).code != 0);
  // Several files are one run.
  const std::string lines_of_one = ran.out.substr(0, ran.out.rfind("place  "));
  CHECK(run(replay_main, "replay", {path, path, "--placement", "prefix_aware"})
            .out.starts_with(lines_of_one + lines_of_one + "place    8 decisions, 6 differ"));
}

TEST_CASE("a worker's event log is its own file beside the server's", "[event_log]") {
  TempDir dir;
  const auto options = Options::parse(all_options(), "worker",
                                      {"--join", "unix:/none", "--event-log", dir.path + "/log"}, 0);
  REQUIRE(options.ok());
  REQUIRE(prepare_build(options.value()).ok());
  CHECK(std::ifstream(dir.path + "/log.pid" + std::to_string(getpid())).good());
  CHECK_FALSE(std::ifstream(dir.path + "/log").good());
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_CASE("simulate: options that it cannot honour are refused, and no file is touched", "[simulate]") {
  TempDir dir;
  const std::string trace = dir.path + "/trace.jsonl", log = dir.path + "/log", json = dir.path + "/json",
                    card = dir.path + "/card.json", link = dir.path + "/link", absent = dir.path + "/absent",
                    config = dir.path + "/config";
  const std::string row = R"({"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]})";
  const std::string fields = R"({"flops_per_s": 1e15, "bytes_per_s": 1e13, "memory_bytes": 1e12})";
  std::ofstream(trace) << row << "\n";
  std::ofstream(card) << fields << "\n";
  std::ofstream(config) << "topology = 1C\n";
  std::filesystem::create_symlink("trace.jsonl", link);
  const auto simulated = [&](std::vector<std::string> more) {
    more.insert(more.begin(), trace);
    return run(simulate_main, "simulate", more);
  };
  CHECK(simulated({"--hardware", card, "--event-log", log, "--json", json}).code == 0);
  CHECK(text_of(log).starts_with("{\"xpyd_event_log\""));
  const std::string kept = text_of(log);
  for (const std::vector<std::string>& files : {std::vector<std::string>{"--event-log", trace},
                                                {"--event-log", link},
                                                {"--json", trace},
                                                {"--event-log", json, "--json", json},
                                                {"--event-log", card, "--hardware", card},
                                                {"--json", card, "--hardware", card},
                                                {"--json", config, "--config", config}}) {
    INFO(files[0] << " " << files[1]);
    CHECK(simulated(files).code == 2);
  }
  CHECK(text_of(trace) == row + "\n");
  CHECK(text_of(card) == fields + "\n");
  CHECK(text_of(config) == "topology = 1C\n");
  CHECK(run(simulate_main, "simulate", {dir.path, "--format", "weka", "--json", trace}).code == 2);
  CHECK(text_of(trace) == row + "\n");
  CHECK_FALSE(std::filesystem::exists(absent));
  for (const auto& [option, value] : {std::pair("--topology", ""),
                                      {"--topology", "1P"},
                                      {"--topology", "5000P1D"},
                                      {"--prefill-pp", "40"},
                                      {"--decode-pp", "41"},  // does not divide the 80 layers
                                      {"--kv-tokens", "511"}}) {
    INFO(option << " " << value);
    CHECK(simulated({option, value, "--json", json}).code == 2);
  }
  CHECK(simulated({"--prefill-pp", "2", "--pipeline-window", "4"}).code == 0);
  CHECK(simulated({"--allocator", "vattention", "--kv-tokens", "600"}).code == 2);
  CHECK(simulated({"--hardware", card, "--host-tokens", "600"}).code == 2);
  CHECK(run(simulate_main, "simulate", {absent}).code != 0);
  CHECK(run(simulate_main, "simulate", {}).code == 2);
  const nlohmann::json numbers = parsed_file(data_path("hostile/simulate.json"));
  for (const auto& [name, values] : numbers.items())
    for (const std::string value : values) {
      INFO(name << " " << value);
      const auto options = Options::parse(all_options(), "simulate", {trace, "--" + name, value}, 1);
      REQUIRE_FALSE(options.ok());
      CHECK(options.error().message.find(name) != std::string::npos);
    }
}

}  // namespace xpyd::testing::event_log_commands_test
