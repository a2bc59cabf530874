// Truth: greedy text of a real model equals what another program says of it, in every topology.

#include <fstream>

#include "experiments/tally.h"
#include "model/tokenizer.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::golden_test {
namespace {

TEST_CASE("stories260k says what llama2.c says", "[golden]") {
  std::string dir = shared_path("models/stories260k");
  std::string golden = shared_path("golden/stories260k_greedy.json");
  if (dir.empty() || golden.empty()) SKIP_TEST("../shared/models or ../shared/golden is absent");
  ModelConfig config = load_model_config(dir).value();
  auto tokenizer = Tokenizer::load(dir).value();
  ThreadTeam team(1);
  auto weights = load_weights(dir, config, {}, team).value();
  auto cases = parsed_file(golden)["cases"];
  REQUIRE(cases.size() >= 6);
  uint64_t hash = 0;
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* scheme : {"paged", "contiguous"}) {
      INFO(topology << " " << scheme);
      RealClock clock;
      ClusterOptions options;
      options.topology = parse_topology(topology).value();
      options.kv_scheme = find_kv_scheme(scheme);
      options.kv.pool_bytes = 32 << 20;
      options.batching = find_batch_policy("chunked");
      options.placement = find_placement_policy("least_loaded");
      options.transport = find_transport("local");
      options.step_tokens = 16;
      options.max_batch = 8;
      options.max_model_len = config.max_position;
      options.eos_tokens = config.eos_tokens;
      options.tokenizer = tokenizer.get();
      options.make_model = [&](int, DeviceQueue&) { return make_llama(weights, team, 16, 8); };
      options.kv.shape = kv_shape(config, Dtype::f32);
      auto cluster = Cluster::create(std::move(options), clock).value();
      std::vector<std::shared_ptr<experiments::Tally>> sinks;
      for (const auto& c : cases) {
        auto request = std::make_shared<Request>();
        request->id = sinks.size();
        request->prompt = tokenizer->encode(c["prompt"].get<std::string>());
        request->sampling.temperature = 0;
        // llama2.c's n steps end after n tokens behind BOS.
        request->max_tokens = c["steps"].get<int>() + 1 - int(request->prompt.size());
        sinks.push_back(std::make_shared<experiments::Tally>());
        REQUIRE(cluster->submit(request, sinks.back()).ok());
      }
      while (cluster->turn()) {
      }
      for (size_t i = 0; i < cases.size(); ++i)
        CHECK(cases[i]["prompt"].get<std::string>() + sinks[i]->text == cases[i]["text"].get<std::string>());
      if (hash == 0) hash = cluster->logits_hash();
      CHECK(cluster->logits_hash() == hash);
    }
}

}  // namespace
}  // namespace xpyd::testing::golden_test
