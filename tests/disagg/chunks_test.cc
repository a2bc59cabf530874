// The chunk policy inside an instance: what its plans were bound by, what is logged of it, and what it is told of
// steps.
#include <nlohmann/json.hpp>

#include "disagg/event_log.h"
#include "experiments/event_log/replay.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::chunks_test {
namespace {

using nlohmann::json;

// Six prompts of 100 tokens and more, one behind the other.
void serve_prompts(TinyCluster& tiny) {
  for (int i = 0; i < 6; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 100 + 60 * i; ++t) prompt.push_back((t * 5 + i) % 96);
    auto request = tiny_request(uint64_t(i), prompt, 4);
    request->arrival_s = tiny.clock.now();
    REQUIRE(tiny.submit(request).ok());
  }
  tiny.run();
  REQUIRE(tiny.recorder->ended() == 6);
}

TEST_CASE("chunks: every decision is logged, is taken again as it was, and binds the plan", "[chunks][event_log]") {
  for (const ChunkPolicy& policy : chunk_policies()) {
    INFO(policy.name);
    TempDir folder;
    const std::string path = folder.path + "/log";
    TinySetup setup{
        .topology = "1C", .step_tokens = 64, .prefill_pp = 2, .log = EventLog::create(path, 64 << 20, "{}").value()};
    setup.chunk_policy = policy.name;
    int64_t decisions = 0, steps = 0;
    {
      TinyCluster tiny(setup);
      serve_prompts(tiny);
      const InstanceStats stats = tiny.cluster->stats().instances[0];
      decisions = stats.chunk_decisions, steps = stats.steps;
      const bool fixed = std::string(policy.name) == "fixed";
      CHECK(decisions == (fixed ? 0 : decisions));
      if (!fixed) CHECK(decisions > 6 * 100 / 64);
      CHECK(decisions < steps);  // steps of decodes alone are not asked about
      // The first of them at least are predicted by a cost that has seen nothing.
      CHECK((stats.chunk_extrapolations > 0) == !fixed);
    }
    setup.log.reset();
    const auto counts = replay({&path, 1}, {}, [](const std::string& line, const std::string& now) {
                          FAIL_CHECK(line << "\nnow " << now);
                        }).value();
    CHECK((counts.contains("chunk") ? counts.at("chunk").decisions : 0) == decisions);
    int held = 0, stages = 0;
    json plan;
    REQUIRE(read_event_logs({&path, 1}, [&](auto&, const json& line) {
              if (line["e"] == "plan") {
                plan = line;
                const json none = json::array(), &view = line["view"];
                for (const auto& [of, runs] : {std::pair("running", "runs"), {"waiting", "admits"}})
                  for (const json& run : line["answer"].value(runs, none)) {
                    const json& s = view[of][run.value("index", size_t{0})];
                    const int left = s["n_tokens"].get<int>() - s.value("n_computed", 0) - s.value("n_held", 0);
                    CHECK(run["n_tokens"] <= left);
                    held += s.value("n_held", 0) > 0;
                  }
              }
              if (line["e"] == "chunk") {  // of that plan
                CHECK(line["answer"]["step_tokens"] == plan["view"]["step_tokens"]);
                stages = line["view"]["stages"];
              }
            }).ok());
    CHECK((held > 0) == (std::string(policy.name) != "fixed"));
    CHECK(stages == (decisions > 0 ? 2 : 0));
    if (decisions == 0) CHECK(plan["view"]["step_tokens"] == 64);
  }
}

// Memory is touched, and kernels are loaded, for the first time: 7234 ms among 221 ms (sglang #17198).
TEST_CASE("chunks: a first step says nothing of what steps take", "[chunks]") {
  TinyCluster tiny({.topology = "1C"});
  const StepCost::Terms before = tiny.cluster->stats().instances[0].cost;
  REQUIRE(tiny.submit(tiny_request(0, {1, 2, 3}, 1)).ok());
  tiny.run();
  CHECK(tiny.cluster->stats().instances[0].steps == 1);
  CHECK(tiny.cluster->stats().instances[0].cost == before);
  REQUIRE(tiny.submit(tiny_request(1, {1, 2, 3}, 1)).ok());
  tiny.run();
  CHECK(tiny.cluster->stats().instances[0].steps == 2);
  CHECK(tiny.cluster->stats().instances[0].cost != before);
}

}  // namespace
}  // namespace xpyd::testing::chunks_test
