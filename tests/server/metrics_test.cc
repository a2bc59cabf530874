// Tests /metrics: the rules of the text format, and that the numbers add up.
#include "server/openai/metrics.h"

#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::metrics_test {

namespace {

struct Parsed {
  std::string error;  // "" if the text conforms
  std::map<std::string, std::string> types;
  std::map<std::string, double> samples;  // "name{labels}" -> value
};

bool is_name(const std::string& text, bool colon) {
  if (text.empty() || (text[0] >= '0' && text[0] <= '9')) return false;
  for (char c : text)
    if (!(std::isalnum(static_cast<unsigned char>(c)) || c == '_' || (colon && c == ':'))) return false;
  return true;
}

// A strict reader of the text format 0.0.4. Each family is one block of HELP, TYPE and samples. Counters end in _total.
// A histogram's buckets rise in both `le` and count, and end with +Inf = _count.
class Reader {
 public:
  Parsed read(const std::string& text) {
    if (text.empty() || text.back() != '\n') fail("does not end with a line feed");
    std::istringstream lines(text);
    for (std::string line; out_.error.empty() && std::getline(lines, line);) {
      line_ = line;
      if (line.starts_with("# HELP "))
        help(line.substr(7));
      else if (line.starts_with("# TYPE "))
        type(line.substr(7));
      else if (line.starts_with("#") || line.empty())
        fail("comment or empty line");
      else
        sample(line);
    }
    end_family();
    return out_;
  }

 private:
  void fail(const std::string& why) {
    if (out_.error.empty()) out_.error = why + ": " + line_;
  }
  void help(const std::string& rest) {
    end_family();
    family_ = rest.substr(0, rest.find(' '));
    if (!is_name(family_, true)) fail("bad name");
    if (rest.find(' ') == rest.npos) fail("HELP without a text");
    if (!families_.insert(family_).second) fail("family told twice");
    type_.clear();
  }
  void type(const std::string& rest) {
    std::string name = rest.substr(0, rest.find(' '));
    if (name != family_ || !type_.empty()) fail("TYPE out of place");
    type_ = rest.substr(rest.find(' ') + 1);
    static const std::set<std::string> kTypes = {"gauge", "counter", "histogram"};
    if (!kTypes.count(type_)) fail("unknown type");
    if (type_ == "counter" && !family_.ends_with("_total")) fail("counter without _total");
    if (type_ != "counter" && family_.ends_with("_total")) fail("_total without counter");
    out_.types[family_] = type_;
  }
  void sample(const std::string& line) {
    size_t name_end = line.find_first_of("{ ");
    std::string name = line.substr(0, name_end), suffix;
    if (type_ == "histogram")
      for (const char* s : {"_bucket", "_sum", "_count"})
        if (name == family_ + s) suffix = s;
    if (type_.empty() || name != family_ + suffix || (type_ == "histogram" && suffix.empty()))
      return fail("sample outside its family");
    std::map<std::string, std::string> labels;
    size_t at = name_end;
    if (line[at] == '{' && !read_labels(line, at, labels)) return;
    if (at >= line.size() || line[at] != ' ') return fail("no space before the value");
    char* end = nullptr;
    double value = std::strtod(line.c_str() + at + 1, &end);
    if (*end != '\0' || end == line.c_str() + at + 1) return fail("bad value");
    if (type_ != "gauge" && (!(value >= 0) || std::isinf(value))) return fail("negative count");
    std::string key = line.substr(0, at);
    if (!out_.samples.emplace(key, value).second) return fail("sample told twice");
    if (type_ == "histogram") histogram(suffix, labels, value);
  }
  bool read_labels(const std::string& line, size_t& at, std::map<std::string, std::string>& labels) {
    ++at;
    while (at < line.size() && line[at] != '}') {
      size_t equals = line.find('=', at);
      std::string name = line.substr(at, equals - at);
      if (equals == line.npos || !is_name(name, false) || line[equals + 1] != '"') return fail("bad label"), false;
      std::string value;
      for (at = equals + 2; at < line.size() && line[at] != '"'; ++at) {
        if (line[at] == '\\' && (line[at + 1] == '\\' || line[at + 1] == '"' || line[at + 1] == 'n'))
          ++at;
        else if (line[at] == '\\')
          return fail("bad escape"), false;
        value += line[at];
      }
      if (!labels.emplace(name, value).second) return fail("label told twice"), false;
      if (line[++at] == ',') ++at;
    }
    return ++at <= line.size();
  }
  void histogram(const std::string& suffix, std::map<std::string, std::string> labels, double value) {
    if (suffix == "_bucket") {
      std::string le = labels.count("le") ? labels["le"] : "";
      double bound = le == "+Inf" ? INFINITY : std::strtod(le.c_str(), nullptr);
      if (le.empty() || bound <= last_bound_) fail("buckets do not rise");
      if (value < last_count_) fail("bucket counts fall");
      last_bound_ = bound, last_count_ = value;
    } else if (suffix == "_count") {
      if (!std::isinf(last_bound_) || value != last_count_) fail("count differs from +Inf bucket");
      complete_ = true;  // the next series, of another engine, begins
      last_bound_ = -INFINITY, last_count_ = 0;
    }
  }
  void end_family() {
    if (type_ == "histogram" && !complete_) fail("incomplete histogram " + family_);
    last_bound_ = -INFINITY, last_count_ = 0, complete_ = false;
  }

  Parsed out_;
  std::string line_, family_, type_;
  std::set<std::string> families_;
  double last_bound_ = -INFINITY, last_count_ = 0;
  bool complete_ = false;
};

bool near(double a, double b) { return std::abs(a - b) < 1e-9; }

Parsed parse(const std::string& text) { return Reader().read(text); }

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

}  // namespace

TEST_CASE("metrics: the text conforms for any model name", "[server][metrics]") {
  CHECK(parse("# HELP a x\n# TYPE a counter\na 1\n").error != "");  // proof that the reader is strict
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
  auto value = [&](const std::string& name, const std::string& engine, const std::string& more = "") {
    std::string key = "vllm:" + name + "{model_name=\"tiny\",engine=\"" + engine + "\"" + more + "}";
    INFO(key);
    REQUIRE(p.samples.count(key) == 1);
    return p.samples[key];
  };
  for (std::string engine : {"P0", "D0"}) {
    double sum = 0;
    for (const char* state : {"free", "active", "cached", "in_transfer"})
      sum += value("kv_blocks", engine, ",state=\"" + std::string(state) + "\"");
    CHECK(sum == 100);
    CHECK(value("kv_cache_usage_perc", engine) == 0.32);
    CHECK(value("prefix_cache_hits_total", engine) == 250);
    CHECK(value("kv_transfer_bytes_total", engine) == 4096);
    CHECK(value("kv_transfer_seconds_total", engine) == 0.5);
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
  for (const auto& [name, more, expected] : rows) CHECK(near(value(name, "all", more), expected));
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
  d.transfers = 17, d.transfer_bytes = 18, d.transfer_seconds = 0.5, d.kv_refused = 20;
  d.fetch.fetches = 21, d.fetch.tokens = 22;
  d.steps = 23, d.step_seconds = 4, d.prompt_tokens = 25, d.generated_tokens = 26;
  d.draft_tokens = 27, d.accepted_tokens = 28;
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
      {"kv_transfers_total", "", 17},
      {"kv_transfer_bytes_total", "", 18},
      {"kv_transfer_seconds_total", "", 0.5},
      {"kv_refused_total", "", 20},
      {"kv_fetches_total", "", 21},
      {"kv_fetched_tokens_total", "", 22},
      {"engine_steps_total", "", 23},
      {"engine_step_seconds_total", "", 4},
      {"engine_prompt_tokens_total", "", 25},
      {"engine_generation_tokens_total", "", 26},
      {"spec_decode_num_draft_tokens_total", "", 27},
      {"spec_decode_num_accepted_tokens_total", "", 28},
      {"kv_occupation_gb_seconds_total", ",phase=\"prefill\"", 1.5},
      {"kv_occupation_gb_seconds_total", ",phase=\"decode\"", 20},
      {"kv_occupation_gb_seconds_total", ",phase=\"transfer\"", 0.25},
      {"model_flops_total", "", 6e12},
      {"mfu", "", 0.5}};
  for (const auto& [name, label, value] : rows) {
    const std::string key = "vllm:" + std::string(name) + "{model_name=\"tiny\",engine=\"";
    INFO(key << label);
    CHECK((p.samples.count(key + "D0\"" + label + "}") == 1 && near(p.samples[key + "D0\"" + label + "}"], value)));
    const bool absent = std::string(name) == "mfu";  // the peak of D1 is unknown
    CHECK(p.samples.count(key + "D1\"" + label + "}") == (absent ? 0 : 1));
    CHECK(p.samples[key + "D1\"" + label + "}"] == 0);
  }
}

TEST_CASE("metrics: the conductor's numbers", "[server][metrics]") {
  ServiceStats stats;
  stats.conductor = {
      .attempts = 9, .failed_attempts = 3, .refused_early = 4, .refused_late = 1, .ended = 8, .kept = 7};
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
