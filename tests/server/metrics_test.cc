// Tests /metrics: the rules of the text format, and that the numbers add up.
#include "server/openai/metrics.h"

#include <cmath>
#include <map>
#include <regex>
#include <sstream>

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::metrics_test {

struct Parsed {
  std::string error;  // "" if the text conforms
  std::map<std::string, std::string> types;
  std::map<std::string, double> samples;  // "name{labels}" -> value
};

// Reads the text format 0.0.4. Each family is one block of HELP, TYPE and samples, and counters end in _total. A
// histogram's buckets rise and end with +Inf, which equals its _count.
Parsed parse(const std::string& text) {
  // NAME{LABEL="TEXT",…} VALUE
  static const std::regex kSample(
      R"re((([a-zA-Z_:][a-zA-Z0-9_:]*)(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)*\})?) ([-+0-9.eE]+|[-+]Inf|NaN))re");
  Parsed out;
  std::string family, type;
  double last_count = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto expect = [&](bool holds, const char* what) {
      if (!holds && out.error.empty()) out.error = what + (": " + line);
    };
    std::istringstream words(line);
    std::string mark, kind, name;
    words >> mark >> kind >> name;
    std::smatch match;
    if (mark == "#" && kind == "HELP") {
      family = name;
      expect(!out.types.count(family), "a family twice");
      type = "";
    } else if (mark == "#" && kind == "TYPE") {
      words >> type;
      expect(name == family && out.types.emplace(family, type).second, "TYPE out of place");
      expect((type == "counter") == family.ends_with("_total"), "_total belongs to counters");
      last_count = 0;
    } else if (!std::regex_match(line, match, kSample)) {
      expect(false, "no sample");
    } else {
      const std::string key = match[1], of = match[2];
      const double value = std::strtod(match[6].str().c_str(), nullptr);
      const bool histogram = type == "histogram";
      expect(!type.empty() && (histogram ? of.starts_with(family + "_") : of == family), "outside its family");
      expect(type == "gauge" || (value >= 0 && std::isfinite(value)), "a count that is negative");
      expect(out.samples.emplace(key, value).second, "a sample twice");
      if (histogram && of == family + "_bucket") {
        expect(value >= last_count, "bucket counts fall");
        last_count = value;
      }
      if (histogram && of == family + "_count") {
        std::string last = key;
        last.replace(last.find("_count"), 6, "_bucket").replace(last.rfind('}'), 1, ",le=\"+Inf\"}");
        expect(out.samples.count(last) == 1 && out.samples[last] == value, "the count differs from the +Inf bucket");
        last_count = 0;
      }
    }
  }
  return out;
}

bool near(double a, double b) { return std::abs(a - b) < 1e-9; }

FinishedRequest one_request() {
  FinishedRequest r;
  r.finishes = {FinishReason::stop, FinishReason::length};
  r.arrival_s = 10;
  r.queued_s = 10.1;
  r.scheduled_s = 10.4;
  r.first_token_s = 11;
  r.last_token_s = 13;
  return r;
}

TEST_CASE("metrics: the text conforms for any model name", "[server][metrics]") {
  // Proof that the reader is strict.
  for (const char* wrong :
       {"# HELP a x\n# TYPE a counter\na 1\n", "# HELP a x\n# TYPE a gauge\na{b=\"\\c\"} 1\n", "a 1\n"})
    CHECK(parse(wrong).error != "");
  FakeService service;
  for (std::string model : {"tiny", "a \"quoted\" \\ name\nwith a line"}) {
    Metrics metrics(model);
    CHECK(parse(metrics.render(service.stats())).error == "");
    metrics.first_token(1.0, 100);
    metrics.finished(one_request());
    metrics.inter_token(0.02);
    CHECK(parse(metrics.render(service.stats())).error == "");
    CHECK(parse(metrics.render(ServiceStats{})).error == "");
  }
}

TEST_CASE("metrics: vLLM's names exist, and their numbers add up", "[server][metrics]") {
  FakeService service;
  Metrics metrics("tiny");
  metrics.first_token(1.0, 100);
  for (int i = 0; i < 40; ++i) metrics.generated_token();
  for (int i = 0; i < 38; ++i) metrics.inter_token(0.05);
  metrics.inter_token(0.00021);
  metrics.finished(one_request());
  Parsed p = parse(metrics.render(service.stats()));
  REQUIRE(p.error == "");
  for (const auto& [type, names] : {std::pair("gauge", "num_requests_running num_requests_waiting kv_cache_usage_perc"),
                                    {"counter",
                                     "prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total "
                                     "prompt_tokens_total generation_tokens_total request_success_total"},
                                    {"histogram",
                                     "time_to_first_token_seconds inter_token_latency_seconds "
                                     "e2e_request_latency_seconds request_queue_time_seconds "
                                     "request_prefill_time_seconds request_decode_time_seconds"}}) {
    std::istringstream words(names);
    for (std::string name; words >> name;) {
      INFO(name);
      CHECK(p.types["vllm:" + name] == type);
    }
  }
  const std::tuple<const char*, const char*, double> rows[] = {
      {"prompt_tokens_total", "", 100},
      {"generation_tokens_total", "", 40},
      {"inter_token_latency_seconds_count", "", 39},
      {"inter_token_latency_seconds_bucket", ",le=\"2e-04\"", 0},
      {"inter_token_latency_seconds_bucket", ",le=\"3e-04\"", 1},
      {"inter_token_latency_seconds_bucket", ",le=\"0.025\"", 1},
      {"inter_token_latency_seconds_bucket", ",le=\"0.05\"", 39},  // le is inclusive
      {"request_success_total", ",finished_reason=\"stop\"", 1},
      {"request_success_total", ",finished_reason=\"length\"", 1},
      {"request_success_total", ",finished_reason=\"abort\"", 0},
      {"e2e_request_latency_seconds_sum", "", 3},
      {"request_queue_time_seconds_sum", "", 0.3},
      {"request_prefill_time_seconds_sum", "", 0.6},
      {"request_decode_time_seconds_sum", "", 2}};
  for (const auto& [name, more, expected] : rows) {
    const std::string key = "vllm:" + std::string(name) + "{model_name=\"tiny\",engine=\"all\"" + more + "}";
    INFO(key);
    CHECK((p.samples.count(key) == 1 && near(p.samples[key], expected)));
  }
}

TEST_CASE("metrics: each number of an instance has its row", "[server][metrics]") {
  ServiceStats stats;
  stats.instances.resize(2);
  stats.instances[0].name = "D0", stats.instances[1].name = "D1";
  InstanceStats& d = stats.instances[0];
  d.running = 1, d.waiting = 2, d.queue_remote_prefilling = 3, d.queue_prefill_sending = 4, d.preemptions = 5;
  d.kv.capacity = 40, d.kv.active = 6, d.kv.in_transfer = 7, d.kv.cached = 8, d.kv.free = 19;
  d.kv.mapped_bytes = 9, d.kv.evictions = 10, d.kv.prefix_query_tokens = 11, d.kv.prefix_hit_tokens = 12;
  d.kv.tiers.host_hit_tokens = 13, d.kv.tiers.disk_hit_tokens = 14;
  d.kv.tiers.bytes_out = 15, d.kv.tiers.bytes_in = 16;
  d.kv.tiers.store_seconds = 29, d.kv.tiers.load_wait_seconds = 30, d.schedule_seconds = 31;
  d.transfers = 17, d.transfer_bytes = 18, d.transfer_seconds = 0.5, d.kv_refused = 20;
  d.fetch.fetches = 21, d.fetch.tokens = 22;
  d.fetch.copies = 32, d.fetch.copy_bytes = 33, d.fetch.copies_dropped = 34;
  d.steps = 23, d.step_seconds = 4, d.prompt_tokens = 25, d.generated_tokens = 26;
  d.draft_tokens = 27, d.accepted_tokens = 28;
  d.experts = {.rows = {30, 31}, .rank_rows = {61, 60}, .layers = 4, .imbalance = 6, .exchanged_bytes = 32};
  d.spent = {.prefill_gb_s = 1.5, .decode_gb_s = 20, .transfer_gb_s = 0.25, .tflop = 6, .peak_tflops = 3};
  Parsed p = parse(Metrics("tiny").render(stats));
  REQUIRE(p.error == "");
  const std::tuple<const char*, const char*, double> rows[] = {
      {"num_requests_running", "", 1},
      {"num_requests_waiting", "", 2},
      {"num_requests_remote_prefilling", "", 3},
      {"num_requests_sending", "", 4},
      {"num_preemptions_total", "", 5},
      {"kv_cache_usage_perc", "", 0.325},
      {"kv_blocks", ",state=\"active\"", 6},
      {"kv_blocks", ",state=\"in_transfer\"", 7},
      {"kv_blocks", ",state=\"cached\"", 8},
      {"kv_blocks", ",state=\"free\"", 19},
      {"kv_mapped_bytes", "", 9},
      {"kv_evictions_total", "", 10},
      {"prefix_cache_queries_total", "", 11},
      {"prefix_cache_hits_total", "", 12},
      {"kv_tier_hit_tokens_total", ",tier=\"host\"", 13},
      {"kv_tier_hit_tokens_total", ",tier=\"disk\"", 14},
      {"kv_offload_store_bytes_total", "", 15},
      {"kv_offload_load_bytes_total", "", 16},
      {"kv_offload_store_seconds_total", "", 29},
      {"kv_offload_load_seconds_total", "", 30},
      {"engine_schedule_seconds_total", "", 31},
      {"kv_transfers_total", "", 17},
      {"kv_transfer_bytes_total", "", 18},
      {"kv_transfer_seconds_total", "", 0.5},
      {"kv_refused_total", "", 20},
      {"kv_fetches_total", "", 21},
      {"kv_fetched_tokens_total", "", 22},
      {"kv_copies_total", "", 32},
      {"kv_copy_bytes_total", "", 33},
      {"kv_copies_dropped_total", "", 34},
      {"engine_steps_total", "", 23},
      {"engine_step_seconds_total", "", 4},
      {"engine_prompt_tokens_total", "", 25},
      {"engine_generation_tokens_total", "", 26},
      {"spec_decode_num_draft_tokens_total", "", 27},
      {"spec_decode_num_accepted_tokens_total", "", 28},
      {"kv_occupation_gb_seconds_total", ",phase=\"prefill\"", 1.5},
      {"kv_occupation_gb_seconds_total", ",phase=\"decode\"", 20},
      {"kv_occupation_gb_seconds_total", ",phase=\"transfer\"", 0.25},
      {"expert_rows_total", ",expert=\"1\"", 31},
      {"expert_rank_rows_total", ",rank=\"0\"", 61},
      {"expert_layers_total", "", 4},
      {"expert_imbalance", "", 1.5},
      {"expert_exchanged_bytes_total", "", 32},
      {"model_flops_total", "", 6e12},
      {"mfu", "", 0.5}};
  for (const auto& [name, label, value] : rows) {
    const std::string key = "vllm:" + std::string(name) + "{model_name=\"tiny\",engine=\"";
    INFO(key << label);
    CHECK((p.samples.count(key + "D0\"" + label + "}") == 1 && near(p.samples[key + "D0\"" + label + "}"], value)));
    // The peak of D1 is unknown, and it has no experts.
    const bool absent = std::string(name) == "mfu" || std::string(name).starts_with("expert_");
    CHECK(p.samples.count(key + "D1\"" + label + "}") == (absent ? 0 : 1));
    CHECK(p.samples[key + "D1\"" + label + "}"] == 0);
  }
}

TEST_CASE("metrics: the conductor's numbers", "[server][metrics]") {
  ServiceStats stats;
  stats.conductor = {.attempts = 9, .failed_attempts = 3, .refused_early = 4, .refused_late = 1, .ended = 8, .kept = 7};
  Parsed p = parse(Metrics("tiny").render(stats));
  REQUIRE(p.error == "");
  const std::string all = "{model_name=\"tiny\",engine=\"all\"";
  CHECK(p.samples["vllm:attempts_total" + all + "}"] == 9);
  CHECK(p.samples["vllm:requests_refused_total" + all + "}"] == 5);
  CHECK(p.samples["vllm:choices_ended_total" + all + "}"] == 8);
  CHECK(p.samples["vllm:choices_kept_total" + all + "}"] == 7);
  CHECK(p.samples["vllm:attempts_failed_total" + all + "}"] == 3);
}

TEST_CASE("metrics: served requests are counted with their tokens and times", "[server][metrics]") {
  TestServer server;
  for (int i = 0; i < 3; ++i)
    CHECK(server.post("/v1/completions", R"({"prompt":"abcd","max_tokens":5,"n":2})").status == 200);
  CHECK(server.post("/v1/completions", R"({"prompt":"abcd","max_tokens":0})").status == 400);
  CHECK(server.post("/v1/completions", R"({"prompt":"abcd","max_tokens":999})").status == 400);
  Parsed p = parse(server.get("/metrics").body);
  REQUIRE(p.error == "");
  auto value = [&](const std::string& name, const std::string& more = "") {
    return p.samples["vllm:" + name + "{model_name=\"tiny\",engine=\"all\"" + more + "}"];
  };
  CHECK(value("prompt_tokens_total") == 12);
  CHECK(value("generation_tokens_total") == 30);
  CHECK(value("request_success_total", ",finished_reason=\"length\"") == 6);
  CHECK(value("time_to_first_token_seconds_count") == 3);
  CHECK(value("inter_token_latency_seconds_count") == 24);
  CHECK(value("e2e_request_latency_seconds_count") == 3);
}

}  // namespace xpyd::testing::metrics_test
