#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/numbers.h"
#include "disagg/conductor/token_times.h"
#include "experiments/load/bench.h"

namespace xpyd::server {

const char* const kBenchDefinitions =
    "send: just before the connection is opened\n"
    "chunk: an event with non-empty `choices`; in a chat, one with content, reasoning or a tool call\n"
    "TTFT: from send to the first chunk; E2EL: from send to the last chunk\n"
    "ITL: gaps between chunks, of all requests together\n"
    "TPOT: (E2EL - TTFT) / (output tokens - 1), for requests with more than one output token\n"
    "TBT: for each request, the mean of the longest tenth of its gaps between chunks\n"
    "output tokens: usage.completion_tokens; percentiles: interpolated linearly, as in numpy\n"
    "failed and refused requests are in no sample\n"
    "refused: the answer is 429, or the stream has an error with code objective_missed; it does not count as failed\n"
    "throughput: over the whole duration, from the first arrival to the last answer\n"
    "goodput: requests that meet all limits\n"
    "concurrency: seconds of all answered requests / duration\n"
    "retokenized: tokens of the answers, counted by the server's /tokenize\n"
    "peak: largest number of chunks in one second; peak concurrent: largest number of requests in flight\n";

Goodput::Goodput() { ttft_ms = tpot_ms = e2el_ms = tbt_ms = std::numeric_limits<double>::infinity(); }

Result<Goodput> parse_goodput(const std::string& text) {
  Goodput goodput;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    size_t colon = std::min(word.find(':'), word.size());
    std::string key = word.substr(0, colon);
    double* limit = key == "ttft"   ? &goodput.ttft_ms
                    : key == "tpot" ? &goodput.tpot_ms
                    : key == "e2el" ? &goodput.e2el_ms
                    : key == "tbt"  ? &goodput.tbt_ms
                                    : nullptr;
    double value = 0;
    if (!limit || !read_number(std::string_view(word).substr(std::min(colon + 1, word.size())), value) ||
        !(value > 0) || std::isinf(value))
      return invalid("--goodput: '" + word +
                     "': expected KEY:MS with ttft, tbt, tpot or e2el, such as 'ttft:200 tbt:50'");
    if (!std::isinf(*limit)) return invalid("--goodput: " + key + " is given twice");
    *limit = value;
    goodput.given = true;
  }
  return goodput;
}

BenchResult summarize_bench(std::span<const RequestRecord> records, double start_s, double duration_s,
                            const Goodput& goodput) {
  BenchResult result;
  result.duration_s = duration_s;
  std::vector<double> ttft, tpot, itl, e2el, lateness, tbt, tbt_max, tbt_p99, retry_after;
  std::vector<int64_t> chunks_per_second;
  std::vector<std::pair<double, int>> sweep;  // time; +1 for a send, -1 for an end
  int good = 0;
  for (const RequestRecord& record : records) {
    lateness.push_back((record.sent_s - record.due_s) * 1e3);
    sweep.emplace_back(record.sent_s, 1);
    sweep.emplace_back(record.end_s, -1);
    result.concurrency += record.end_s - record.sent_s;
    if (record.retry_after_s >= 0) retry_after.push_back(record.retry_after_s);
    if (!record.ok() || record.chunk_s.empty()) {
      ++(record.refused ? result.refused : result.failed);
      continue;
    }
    ++result.completed;
    result.without_usage += !record.has_usage;
    result.input_tokens += record.input_tokens;
    result.output_tokens += record.output_tokens;
    double first_ms = (record.chunk_s.front() - record.sent_s) * 1e3;
    double last_ms = (record.chunk_s.back() - record.sent_s) * 1e3;
    double per_token_ms = 0;  // a one-token output meets any TPOT limit
    ttft.push_back(first_ms);
    e2el.push_back(last_ms);
    if (record.output_tokens > 1) {
      per_token_ms = (last_ms - first_ms) / (record.output_tokens - 1);
      tpot.push_back(per_token_ms);
    }
    TokenTimes times;
    std::vector<double> gaps;
    for (size_t i = 0; i < record.chunk_s.size(); ++i) {
      times.token(record.chunk_s[i]);
      if (i > 0) gaps.push_back((record.chunk_s[i] - record.chunk_s[i - 1]) * 1e3);
      auto second = size_t(std::max(0.0, record.chunk_s[i] - start_s));
      if (second >= chunks_per_second.size()) chunks_per_second.resize(second + 1, 0);
      ++chunks_per_second[second];
    }
    const double tbt_ms = times.worst_tenth() * 1e3;  // 0 if the output is one token
    itl.insert(itl.end(), gaps.begin(), gaps.end());
    if (const Summary own = summarize(std::move(gaps)); own.count > 0)
      tbt.push_back(tbt_ms), tbt_max.push_back(own.max), tbt_p99.push_back(own.p99);
    good += first_ms <= goodput.ttft_ms && per_token_ms <= goodput.tpot_ms && last_ms <= goodput.e2el_ms &&
            tbt_ms <= goodput.tbt_ms;
  }
  // Sorting puts an end before a send at the same time.
  std::sort(sweep.begin(), sweep.end());
  int running = 0;
  for (auto [time, change] : sweep) {
    running += change;
    result.max_concurrent_requests = std::max(result.max_concurrent_requests, running);
  }
  for (int64_t chunks : chunks_per_second)
    result.max_output_tokens_per_s = std::max(result.max_output_tokens_per_s, double(chunks));
  if (duration_s > 0) {
    result.request_throughput = result.completed / duration_s;
    result.request_goodput = good / duration_s;
    result.concurrency /= duration_s;
    result.input_throughput = double(result.input_tokens) / duration_s;
    result.output_throughput = double(result.output_tokens) / duration_s;
    result.total_token_throughput = double(result.input_tokens + result.output_tokens) / duration_s;
  }
  if (!records.empty()) result.slo_attainment = double(good) / double(records.size());
  result.ttft_ms = summarize(std::move(ttft));
  result.tpot_ms = summarize(std::move(tpot));
  result.itl_ms = summarize(std::move(itl));
  result.e2el_ms = summarize(std::move(e2el));
  result.lateness_ms = summarize(std::move(lateness));
  result.tbt_ms = summarize(std::move(tbt));
  result.tbt_max_ms = summarize(std::move(tbt_max));
  result.tbt_p99_ms = summarize(std::move(tbt_p99));
  result.retry_after_s = summarize(std::move(retry_after));
  return result;
}

namespace {

std::string fixed(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

class BenchTable {
 public:
  std::string text;
  void title(const std::string& name, char fill) {  // Python's "{s:{n}{c}^50}"
    constexpr int kColumns = 50;
    int left = (kColumns - int(name.size())) / 2;
    std::string line = std::string(size_t(std::max(left, 0)), fill) + name;
    line.resize(kColumns, fill);
    text += line + "\n";
  }
  void row(const std::string& name, const std::string& value) {
    char line[128];
    std::snprintf(line, sizeof line, "%-40s %-10s\n", name.c_str(), value.c_str());
    text += line;
  }
  void tbt(const BenchResult& result) {
    title("Longest Tenth of a Request's Gaps", '-');
    row("Mean TBT (ms):", fixed(result.tbt_ms.mean));
    row("Median TBT (ms):", fixed(result.tbt_ms.median));
    row("P99 TBT (ms):", fixed(result.tbt_ms.p99));
    row("Max TBT (ms):", fixed(result.tbt_max_ms.max));
  }
};

}  // namespace

std::string sglang_table(const BenchResult& result, const BenchSetting& setting) {
  BenchTable table;
  const auto row = [&table](const char* name, const std::string& value) { table.row(name, value); };
  table.title(" Serving Benchmark Result ", '=');
  row("Backend:", setting.backend);
  row("Traffic request rate:", std::isinf(setting.request_rate) ? "inf" : fixed(setting.request_rate));
  row("Max request concurrency:", setting.max_concurrency > 0 ? std::to_string(setting.max_concurrency) : "not set");
  row("Successful requests:", std::to_string(result.completed));
  row("Benchmark duration (s):", fixed(result.duration_s));
  row("Total input tokens:", std::to_string(result.input_tokens));
  row("Total generated tokens:", std::to_string(result.output_tokens));
  row("Total generated tokens (retokenized):",
      result.retokenized < 0 ? "not known" : std::to_string(result.retokenized));
  row("Request throughput (req/s):", fixed(result.request_throughput));
  row("Input token throughput (tok/s):", fixed(result.input_throughput));
  row("Output token throughput (tok/s):", fixed(result.output_throughput));
  row("Total token throughput (tok/s):", fixed(result.total_token_throughput));
  row("Concurrency:", fixed(result.concurrency));
  table.title("End-to-End Latency", '-');
  row("Mean E2E Latency (ms):", fixed(result.e2el_ms.mean));
  row("Median E2E Latency (ms):", fixed(result.e2el_ms.median));
  const auto section = [&](const char* head, const std::string& name, const Summary& summary) {
    table.title(head, '-');
    table.row("Mean " + name + " (ms):", fixed(summary.mean));
    table.row("Median " + name + " (ms):", fixed(summary.median));
    table.row("P99 " + name + " (ms):", fixed(summary.p99));
  };
  section("Time to First Token", "TTFT", result.ttft_ms);
  section("Time per Output Token (excl. 1st token)", "TPOT", result.tpot_ms);
  section("Inter-Token Latency", "ITL", result.itl_ms);
  table.tbt(result);
  table.title("", '=');
  return table.text;
}

std::string bench_table(const BenchResult& result, const BenchSetting& setting) {
  BenchTable table;
  const auto title = [&table](const char* name, char fill) { table.title(name, fill); };
  const auto row = [&table](const std::string& name, const std::string& value) { table.row(name, value); };
  title(" Serving Benchmark Result ", '=');
  row("Successful requests:", std::to_string(result.completed));
  row("Failed requests:", std::to_string(result.failed));
  if (result.refused > 0) {
    row("Refused requests (429):", std::to_string(result.refused));
    row("Mean Retry-After (s):", fixed(result.retry_after_s.mean));
  }
  if (setting.max_concurrency > 0) row("Maximum request concurrency:", std::to_string(setting.max_concurrency));
  if (!std::isinf(setting.request_rate)) row("Request rate configured (RPS):", fixed(setting.request_rate));
  row("Benchmark duration (s):", fixed(result.duration_s));
  row("Total input tokens:", std::to_string(result.input_tokens));
  row("Total generated tokens:", std::to_string(result.output_tokens));
  row("Request throughput (req/s):", fixed(result.request_throughput));
  if (setting.has_goodput) {
    row("Request goodput (req/s):", fixed(result.request_goodput));
    row("SLO attainment (%):", fixed(100 * result.slo_attainment));
  }
  row("Output token throughput (tok/s):", fixed(result.output_throughput));
  row("Peak output token throughput (tok/s):", fixed(result.max_output_tokens_per_s));
  row("Peak concurrent requests:", std::to_string(result.max_concurrent_requests));
  row("Total token throughput (tok/s):", fixed(result.total_token_throughput));
  auto section = [&](const char* head, const char* name, const Summary& summary) {
    title(head, '-');
    row("Mean " + std::string(name) + " (ms):", fixed(summary.mean));
    row("Median " + std::string(name) + " (ms):", fixed(summary.median));
    row("P99 " + std::string(name) + " (ms):", fixed(summary.p99));
  };
  section("Time to First Token", "TTFT", result.ttft_ms);
  section("Time per Output Token (excl. 1st token)", "TPOT", result.tpot_ms);
  section("Inter-token Latency", "ITL", result.itl_ms);
  table.tbt(result);
  section("End-to-end Latency", "E2EL", result.e2el_ms);
  title("", '=');
  return table.text;
}

nlohmann::json bench_json(const BenchResult& result) {
  nlohmann::json out = {{"duration", result.duration_s},
                        {"completed", result.completed},
                        {"failed", result.failed},
                        {"refused", result.refused},
                        {"refused_with_retry_after", result.retry_after_s.count},
                        {"mean_retry_after_s", result.retry_after_s.mean},
                        {"total_input_tokens", result.input_tokens},
                        {"total_output_tokens", result.output_tokens},
                        {"request_throughput", result.request_throughput},
                        {"request_goodput", result.request_goodput},
                        {"slo_attainment", result.slo_attainment},
                        {"input_throughput", result.input_throughput},
                        {"output_throughput", result.output_throughput},
                        {"concurrency", result.concurrency},
                        {"retokenized", result.retokenized < 0 ? nlohmann::json() : nlohmann::json(result.retokenized)},
                        {"total_token_throughput", result.total_token_throughput},
                        {"max_output_tokens_per_s", result.max_output_tokens_per_s},
                        {"max_concurrent_requests", result.max_concurrent_requests},
                        {"completed_without_usage", result.without_usage}};
  auto add = [&](const std::string& name, const Summary& s) {
    out["mean_" + name] = s.mean;
    out["median_" + name] = s.median;
    out["std_" + name] = s.std;
    out["p90_" + name] = s.p90;
    out["p95_" + name] = s.p95;
    out["p99_" + name] = s.p99;
  };
  add("ttft_ms", result.ttft_ms);
  add("tpot_ms", result.tpot_ms);
  add("itl_ms", result.itl_ms);
  add("e2el_ms", result.e2el_ms);
  add("tbt_worst_tenth_ms", result.tbt_ms);
  add("tbt_max_ms", result.tbt_max_ms);
  add("tbt_p99_ms", result.tbt_p99_ms);
  add("client_queue_time_ms", result.lateness_ms);
  return out;
}

nlohmann::json bench_details(std::span<const RequestRecord> records, double start_s) {
  auto array = [] { return nlohmann::json::array(); };
  nlohmann::json out = {{"input_lens", array()},  {"output_lens", array()}, {"ttfts", array()},
                        {"itls", array()},        {"latencies", array()},   {"start_times", array()},
                        {"queue_times", array()}, {"errors", array()},      {"generated_texts", array()}};
  for (const RequestRecord& record : records) {
    bool any = !record.chunk_s.empty();
    out["input_lens"].push_back(record.input_tokens);
    out["output_lens"].push_back(record.output_tokens);
    out["ttfts"].push_back(any ? record.chunk_s.front() - record.sent_s : 0);
    nlohmann::json gaps = array();
    for (size_t i = 1; i < record.chunk_s.size(); ++i) gaps.push_back(record.chunk_s[i] - record.chunk_s[i - 1]);
    out["itls"].push_back(std::move(gaps));
    out["latencies"].push_back(any ? record.chunk_s.back() - record.sent_s : 0);
    out["start_times"].push_back(record.sent_s - start_s);
    out["queue_times"].push_back(record.sent_s - record.due_s);
    out["generated_texts"].push_back(record.text);
    out["errors"].push_back(record.error);
  }
  return out;
}

}  // namespace xpyd::server
