// Runs every experiment at test sizes: its points run, nothing is wrong, and all rows of one experiment have the same
// columns. GPU experiments run on the interpreter.
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>

#include "experiments/experiment.h"
#include "experiments/lengths.h"
#include "experiments/load.h"
#include "experiments/simulated.h"
#include "experiments/values.h"
#include "tests/catch.h"

namespace xpyd::testing::experiments_test {

std::vector<std::string> columns(const Values& row) {
  std::vector<std::string> names;
  for (const auto& [name, value] : row) names.push_back(name);
  return names;
}

TEST_CASE("experiments: a sample of points of every experiment runs at test sizes", "[.][slow][experiments]") {
  REQUIRE(all_experiments().size() >= 13);
  for (const Experiment& e : all_experiments()) {
    Setting setting{.device = e.device == std::string("cuda") ? "cuda" : "cpu",
                    .tiny = true,
                    .traces = testing::shared_path("traces")};
    const std::vector<Values> points = e.points(setting);
    if (points.empty()) continue;  // its traces are not here
    const Measure measure = e.open(setting);
    std::vector<std::string> first;
    // Large tables are sampled, because all of their points run the same code.
    const size_t stride = std::max<size_t>(1, (points.size() + 4) / 5);
    for (size_t i = 0; i < points.size(); i += stride) {
      INFO(e.name << " on " << setting.device << " at " << points[i].dump());
      Result<Finding> found = measure(points[i]);
      INFO((found ? found.value().wrong : found.error().message));
      REQUIRE(found.ok());
      REQUIRE(found.value().wrong.empty());
      REQUIRE_FALSE(found.value().rows.empty());
      for (const Values& row : found.value().rows) {
        if (first.empty()) first = columns(row);
        CHECK(columns(row) == first);
        for (const auto& [name, value] : row)
          if (value.is_number()) CHECK(std::isfinite(double(value)));
      }
    }
  }
}

TEST_CASE("experiments: a cluster whose logits differ is not timed", "[experiments]") {
  // bf16 weights are another model.
  Setting setting{.tiny = true};
  Bed bed(setting, {"experiments/models/llama-tiny", "--kv-bytes", "4MiB", "--max-batch", "4"});
  Result<std::string> same = bed.open({"--topology", "1P1D"});
  REQUIRE(same.ok());
  CHECK(same.value().empty());
  Result<std::string> other = bed.open({"--topology", "1C", "--dtype", "bf16"});
  REQUIRE(other.ok());
  CHECK(other.value().find("logits hash") != std::string::npos);
  CHECK_FALSE(bed.open({"--topology", "1Q"}).ok());
}

TEST_CASE("experiments: tool&agent is read where its file is, and generated where it is not", "[experiments]") {
  const TempDir dir;
  const Setting setting{.traces = dir.path};
  CHECK(source_of(mooncake_trace("tool_agent", setting, {}).value()) == std::string("generated"));
  std::ofstream(dir.path + "/mooncake_toolagent.jsonl")
      << R"({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]})"
      << "\n";
  const disagg::Trace trace = mooncake_trace("tool_agent", setting, {}).value();
  CHECK(source_of(trace) == std::string("trace"));
  CHECK(trace.requests.size() == 1);
  CHECK_FALSE(mooncake_trace("synthetic", setting, {}).ok());
}

TEST_CASE("experiments: the runner, result files and claims pass their own tests", "[.][slow][experiments]") {
  if (std::system("python3 -c 'import dataclasses' 2>/dev/null") != 0) SKIP_TEST("no python3");
  CHECK(std::system("mkdir -p build/tmp && python3 experiments/test_run.py >build/tmp/test_run.log 2>&1 || "
                    "{ cat build/tmp/test_run.log; false; }") == 0);
}

// A percentile that its sample cannot support is not written. 20 requests once had a P99.
TEST_CASE("issues: a percentile that its sample cannot support is absent", "[issues][experiments][evidence]") {
  for (auto [n, p, there] : {std::tuple{20, 99., false},
                             {1999, 99., false},
                             {2000, 99., true},
                             {199, 90., false},
                             {200, 90., true},
                             {200, 10., true},
                             {39, 50., false},
                             {40, 50., true},
                             {0, 50., false}}) {
    std::vector<double> sample(static_cast<size_t>(n));
    std::iota(sample.begin(), sample.end(), 0);
    const Value value = percentile_seen(sample, p);
    INFO(n << " samples, P" << p);
    CHECK(value.is_number() == there);
    if (!there)
      CHECK(std::string(value).empty());
    else
      CHECK(double(value) == Approx(p / 100 * (n - 1)));
  }
}

}  // namespace xpyd::testing::experiments_test
