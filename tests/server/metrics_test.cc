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
  r.n = 2;
  r.prompt_tokens = 100;
  r.cached_tokens = 64;
  r.max_tokens = 50;
  r.generated = {20, 12};
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
    Metrics metrics("vllm", model, 4096);
    CHECK(parse(metrics.render(service.stats())).error == "");
    metrics.first_token(1.0, 100, 64);
    metrics.finished(one_request());
    metrics.inter_token(0.02);
    metrics.http_request("/v1/completions", "POST", 200);
    metrics.http_request("none", "BREW", 405);
    CHECK(parse(metrics.render(service.stats())).error == "");
    CHECK(parse(metrics.render(ServiceStats{})).error == "");
  }
  CHECK(Metrics::valid_prefix("vllm"));
  for (const char* bad : {"", "1a", "a-b", "a:b", "a b"}) CHECK_FALSE(Metrics::valid_prefix(bad));
}

TEST_CASE("metrics: vLLM's names exist, and their numbers add up", "[server][metrics]") {
  FakeService service;
  Metrics metrics("vllm", "tiny", 4096);
  metrics.first_token(1.0, 100, 64);
  for (int i = 0; i < 40; ++i) metrics.generated_token();
  for (int i = 0; i < 38; ++i) metrics.inter_token(0.05);
  metrics.finished(one_request());
  metrics.rejected(RejectReason::unavailable);
  Parsed p = parse(metrics.render(service.stats()));
  REQUIRE(p.error == "");
  for (const auto& [type, names] : {std::pair("gauge",
                                              "num_requests_running num_requests_waiting kv_cache_usage_perc "
                                              "gpu_cache_usage_perc cache_config_info"),
                                    {"counter",
                                     "prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total "
                                     "prompt_tokens_total generation_tokens_total request_success_total"},
                                    {"histogram",
                                     "time_to_first_token_seconds inter_token_latency_seconds "
                                     "time_per_output_token_seconds e2e_request_latency_seconds "
                                     "request_queue_time_seconds request_prefill_time_seconds "
                                     "request_decode_time_seconds request_inference_time_seconds request_prompt_tokens "
                                     "request_generation_tokens request_params_n request_params_max_tokens"}}) {
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
    CHECK(sum == value("kv_blocks_capacity", engine));
    CHECK(sum == 100);
    CHECK(value("kv_cache_usage_perc", engine) == 0.32);
    CHECK(value("prefix_cache_hits_total", engine) == 250);
    CHECK(value("kv_transfer_bytes_total", engine) == 4096);
    CHECK(value("kv_transfer_seconds_total", engine) == 0.5);
  }
  const std::tuple<const char*, const char*, double> rows[] = {
      {"prompt_tokens_total", "", 100},
      {"generation_tokens_total", "", 40},
      {"prompt_tokens_cached_total", "", 64},
      {"inter_token_latency_seconds_count", "", 38},
      {"inter_token_latency_seconds_bucket", ",le=\"0.025\"", 0},
      {"inter_token_latency_seconds_bucket", ",le=\"0.05\"", 38},  // le is inclusive
      {"request_success_total", ",finished_reason=\"stop\"", 1},
      {"request_success_total", ",finished_reason=\"length\"", 1},
      {"request_success_total", ",finished_reason=\"abort\"", 0},
      {"requests_rejected_total", ",reason=\"unavailable\"", 1},
      {"e2e_request_latency_seconds_sum", "", 3},
      {"request_queue_time_seconds_sum", "", 0.3},
      {"request_prefill_time_seconds_sum", "", 0.6},
      {"request_decode_time_seconds_sum", "", 2},
      {"request_inference_time_seconds_sum", "", 2.6}};
  for (const auto& [name, more, expected] : rows) CHECK(near(value(name, "all", more), expected));
}

TEST_CASE("metrics: KV occupation is reported by phase, and MFU where the peak is known", "[server][metrics][mfu]") {
  FakeService service;
  ServiceStats stats = service.stats();
  REQUIRE(stats.instances.size() == 2);
  InstanceStats& one = stats.instances[0];
  one.spent = {.prefill_gb_s = 1.5, .decode_gb_s = 20, .transfer_gb_s = 0.25, .tflop = 6, .peak_tflops = 3};
  one.step_seconds = 4;
  stats.instances[1].spent.tflop = 2, stats.instances[1].step_seconds = 1;
  Parsed p = parse(Metrics("x", "tiny", 16).render(stats));
  REQUIRE(p.error == "");
  const auto key = [&](const std::string& name, int i, const std::string& more = "") {
    return "x:" + name + "{model_name=\"tiny\",engine=\"" + stats.instances[size_t(i)].name + "\"" + more + "}";
  };
  CHECK(p.samples[key("kv_occupation_gb_seconds_total", 0, ",phase=\"prefill\"")] == 1.5);
  CHECK(p.samples[key("kv_occupation_gb_seconds_total", 0, ",phase=\"decode\"")] == 20);
  CHECK(p.samples[key("kv_occupation_gb_seconds_total", 0, ",phase=\"transfer\"")] == 0.25);
  CHECK(p.samples[key("model_flops_total", 0)] == 6e12);
  CHECK(p.samples[key("model_flops_total", 1)] == 2e12);
  CHECK(p.samples[key("mfu", 0)] == 0.5);
  CHECK(p.samples.count(key("mfu", 1)) == 0);  // its peak is unknown
  one.spent.peak_tflops = 0;
  CHECK(parse(Metrics("x", "tiny", 16).render(stats)).types.count("x:mfu") == 0);
}

TEST_CASE("metrics: blocks of a shared pool are reported once", "[server][metrics]") {
  FakeService service;
  ServiceStats stats = service.stats();
  stats.shared_pool = true;
  Parsed p = parse(Metrics("x", "tiny", 16).render(stats));
  REQUIRE(p.error == "");
  int capacities = 0;
  for (const auto& [key, value] : p.samples) capacities += key.starts_with("x:kv_blocks_capacity");
  CHECK(capacities == 1);
  CHECK(p.samples.count("x:kv_blocks_capacity{model_name=\"tiny\",engine=\"pool\"}") == 1);
}

TEST_CASE("metrics under vLLM's newer names exist, with buckets for token times of 0.2 ms", "[server][metrics]") {
  Metrics metrics("vllm", "tiny", 256);
  metrics.inter_token(0.00021);
  FinishedRequest done;
  done.generated = {11, 6};
  done.finishes = {FinishReason::length, FinishReason::length};
  done.n = 2;
  done.preemptions = 3;
  done.arrival_s = 1, done.queued_s = 1, done.scheduled_s = 1.5, done.first_token_s = 2;
  done.last_token_s = 2.004;
  metrics.finished(done);
  ServiceStats stats;
  InstanceStats d;
  d.name = "D0";
  d.waiting = 4, d.queue_remote_prefilling = 5;
  d.transfers = 2, d.transfer_bytes = 4096, d.transfer_descriptors = 6, d.transfer_seconds = 0.5;
  d.kv_refused = 7, d.leases_expired = 8;
  d.kv.prefix_query_tokens = 100, d.kv.prefix_hit_tokens = 30;
  d.kv.tiers.host_capacity = 10, d.kv.tiers.host_blocks = 5, d.kv.tiers.host_hit_tokens = 16;
  d.kv.tiers.disk_hit_tokens = 4, d.kv.tiers.bytes_out = 1000, d.kv.tiers.bytes_in = 500;
  stats.instances = {d};
  stats.conductor.prefill_jobs = 9;
  const std::string text = metrics.render(stats);
  for (const char* row : {"inter_token_latency_seconds_bucket all le=2e-04 0",
                          "inter_token_latency_seconds_bucket all le=3e-04 1",
                          "num_requests_waiting_by_reason D0 reason=capacity 4",
                          "num_requests_waiting_by_reason D0 reason=deferred 5",
                          "request_time_per_output_token_seconds_bucket all le=3e-04 0",
                          "request_time_per_output_token_seconds_bucket all le=5e-04 1",
                          "request_num_preemptions_sum all - 3",
                          "request_num_preemptions_bucket all le=2 0",
                          "external_prefix_cache_queries_total D0 - 70",
                          "external_prefix_cache_hits_total D0 - 20",
                          "kv_offload_store_bytes_total D0 - 1000",
                          "kv_offload_load_bytes_total D0 - 500",
                          "kv_offload_cpu_cache_usage_perc D0 - 0.5",
                          "nixl_bytes_transferred_sum D0 - 4096",
                          "nixl_bytes_transferred_count D0 - 2",
                          "nixl_num_descriptors_sum D0 - 6",
                          "nixl_post_time_seconds_sum D0 - 0.5",
                          "nixl_num_failed_transfers_total D0 - 7",
                          "nixl_num_kv_expired_reqs_total D0 - 8",
                          "global_prefill_queue_length all - 9"}) {
    std::istringstream words(row);
    std::string name, engine, more, value;
    words >> name >> engine >> more >> value;
    const size_t equals = more.find('=');
    more = more == "-" ? "" : "," + more.substr(0, equals + 1) + '"' + more.substr(equals + 1) + '"';
    INFO(row);
    CHECK(text.find("\nvllm:" + name + "{model_name=\"tiny\",engine=\"" + engine + "\"" + more + "} " + value + "\n") !=
          std::string::npos);
  }
}

TEST_CASE("metrics: a client cannot create labels", "[server][metrics]") {
  TestServer server;
  for (int i = 0; i < 50; ++i) {
    server.get("/no/such/path/" + std::to_string(i));
    Client client(server.port());
    client.send("M" + std::to_string(i) + " / HTTP/1.1\r\nHost: a\r\n\r\n");
    CHECK(client.read().status == 405);
  }
  Parsed p = parse(server.get("/metrics").body);
  REQUIRE(p.error == "");
  int series = 0;
  for (const auto& [key, value] : p.samples) series += key.starts_with("http_requests_total");
  CHECK(series == 2);
  CHECK(p.samples["http_requests_total{handler=\"none\",method=\"GET\",status=\"4xx\"}"] == 50);
  CHECK(p.samples["http_requests_total{handler=\"/\",method=\"other\",status=\"4xx\"}"] == 50);
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
  CHECK(value("prompt_tokens_cached_total") == 0);
  CHECK(value("generation_tokens_total") == 30);
  CHECK(value("request_success_total", ",finished_reason=\"length\"") == 6);
  CHECK(value("time_to_first_token_seconds_count") == 3);
  CHECK(value("inter_token_latency_seconds_count") == 24);
  CHECK(value("e2e_request_latency_seconds_count") == 3);
  CHECK(value("requests_rejected_total", ",reason=\"invalid\"") == 1);
  CHECK(value("requests_rejected_total", ",reason=\"too_long\"") == 1);
  CHECK(p.samples["http_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"2xx\"}"] == 3);
  CHECK(p.samples["http_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"4xx\"}"] == 2);
}

TEST_CASE("metrics: tiers have a row for each tier, way and failure", "[server][metrics]") {
  FakeService service;
  Metrics metrics("vllm", "tiny", 4096);
  ServiceStats stats = service.stats();
  REQUIRE(stats.instances.size() == 2);
  for (const auto& [key, value] : parse(metrics.render(stats)).samples)
    CHECK(key.find("kv_tier") == std::string::npos);  // without offload tiers there are no such rows
  OffloadStats& t = stats.instances[0].kv.tiers;
  const std::pair<int64_t OffloadStats::*, const char*> rows[] = {
      {&OffloadStats::host_blocks, "kv_tier_blocks tier=host"},
      {&OffloadStats::disk_blocks, "kv_tier_blocks tier=disk"},
      {&OffloadStats::host_capacity, "kv_tier_blocks_capacity tier=host"},
      {&OffloadStats::disk_capacity, "kv_tier_blocks_capacity tier=disk"},
      {&OffloadStats::host_hit_tokens, "kv_tier_hit_tokens_total tier=host"},
      {&OffloadStats::disk_hit_tokens, "kv_tier_hit_tokens_total tier=disk"},
      {&OffloadStats::host_evictions, "kv_tier_evictions_total tier=host"},
      {&OffloadStats::disk_evictions, "kv_tier_evictions_total tier=disk"},
      {&OffloadStats::bytes_out, "kv_tier_bytes_total way=pool_to_host"},
      {&OffloadStats::bytes_in, "kv_tier_bytes_total way=host_to_pool"},
      {&OffloadStats::disk_bytes_written, "kv_tier_bytes_total way=host_to_disk"},
      {&OffloadStats::disk_bytes_read, "kv_tier_bytes_total way=disk_to_host"},
      {&OffloadStats::copies_out, "kv_tier_copies_total way=pool_to_host"},
      {&OffloadStats::copies_in, "kv_tier_copies_total way=host_to_pool"},
      {&OffloadStats::failed_writes, "kv_tier_failures_total what=write"},
      {&OffloadStats::failed_reads, "kv_tier_failures_total what=read"},
      {&OffloadStats::dropped_out, "kv_tier_dropped_blocks_total "},
  };
  int64_t n = 0;
  for (const auto& [field, name] : rows) t.*field = ++n;
  t.load_wait_seconds = 0.25;
  Parsed p = parse(metrics.render(stats));
  REQUIRE(p.error == "");
  n = 0;
  for (const auto& [field, name] : rows) {
    std::string family = name, label = family.substr(family.find(' ') + 1);
    family.resize(family.find(' '));
    if (!label.empty())
      label = "," + label.substr(0, label.find('=')) + "=\"" + label.substr(label.find('=') + 1) + "\"";
    const std::string before = "vllm:" + family + "{model_name=\"tiny\",engine=\"",
                      own = before + stats.instances[0].name + "\"" + label + "}",
                      other = before + stats.instances[1].name + "\"" + label + "}";
    INFO(own);
    CHECK((p.samples.count(own) == 1 && p.samples[own] == double(++n)));
    CHECK((p.samples.count(other) == 1 && p.samples[other] == 0));
    CHECK(p.types["vllm:" + family] == (family.ends_with("_total") ? "counter" : "gauge"));
  }
  CHECK(p.samples["vllm:kv_tier_load_seconds_total{model_name=\"tiny\",engine=\"" + stats.instances[0].name + "\"}"] ==
        0.25);
}

}  // namespace xpyd::testing::metrics_test
