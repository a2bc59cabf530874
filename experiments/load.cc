#include "experiments/load.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "experiments/stats.h"
#include "server/build.h"

namespace xpyd::experiments {
namespace {

constexpr double kPatience = 600;  // seconds after which a run counts as stuck

// The answer to one request. If several engines work on it, they write one after the other.
class Recorder final : public EventSink {
 public:
  explicit Recorder(RequestRecord& record) : record_(record) {}
  void on_event(TokenEvent event) override {
    if (event.token >= 0) {
      record_.chunk_s.push_back(event.time_s);
      ++record_.output_tokens;
      cached_tokens = event.cached_tokens;
    }
    if (event.finish == FinishReason::none) return;
    record_.end_s = event.time_s;
    if (event.finish != FinishReason::length)
      record_.error = std::string("ended by ") + finish_reason_name(event.finish) + " " + event.error;
  }
  int cached_tokens = 0;

 private:
  RequestRecord& record_;
};

void sleep_until(Clock& clock, double time_s) {
  double left = time_s - clock.now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

}  // namespace

Run run_load(Build& build, const std::vector<BenchRequest>& requests, const std::vector<double>& due) {
  static std::atomic<uint64_t> next_id{1};  // unique in this process, as Request requires
  Cluster& cluster = *build.cluster;
  const size_t n = requests.size();
  std::vector<std::shared_ptr<Request>> made;
  for (const BenchRequest& r : requests) {
    auto request = std::make_shared<Request>();
    request->id = next_id.fetch_add(1);
    request->prompt = prompt_tokens(r, build.config.vocab);
    request->sampling.temperature = 0;
    request->max_tokens = r.output_tokens;
    request->ignore_eos = true;
    made.push_back(std::move(request));
  }
  std::vector<RequestRecord> records(n);
  std::vector<std::shared_ptr<Recorder>> sinks;
  const uint64_t hash_before = cluster.stats().conductor.logits_hash;
  Run run;
  const double start = build.clock.now();
  for (size_t i = 0; i < n; ++i) {
    RequestRecord& record = records[i];
    record.due_s = due.empty() ? build.clock.now() : start + due[i];
    sleep_until(build.clock, record.due_s);
    record.sent_s = made[i]->arrival_s = build.clock.now();
    record.input_tokens = requests[i].input_tokens;
    record.has_usage = true;
    sinks.push_back(std::make_shared<Recorder>(record));
    if (Status status = cluster.submit(made[i], sinks.back()); !status)
      record.error = status.error().message, record.end_s = record.sent_s;
    if (due.empty()) cluster.wait_idle(kPatience);
  }
  if (!cluster.wait_idle(kPatience)) {
    cluster.stop();
    run.wrong = "requests are still running after " + std::to_string(int(kPatience)) + " s";
    return run;
  }
  run.result = summarize_bench(records, start, build.clock.now() - start, {});
  run.logits_hash = cluster.stats().conductor.logits_hash - hash_before;
  double cached = 0;
  for (size_t i = 0; i < n; ++i) {
    const RequestRecord& record = records[i];
    if (!record.ok() || record.output_tokens != requests[i].output_tokens) {
      run.wrong = "request " + std::to_string(i) + " got " + std::to_string(record.output_tokens) + " of " +
                  std::to_string(requests[i].output_tokens) + " tokens " + record.error;
      return run;
    }
    cached += sinks[i]->cached_tokens;
    run.ttft_ms.push_back(1e3 * (record.chunk_s.front() - record.sent_s));
    std::vector<double> gaps;
    for (size_t t = 1; t < record.chunk_s.size(); ++t)
      gaps.push_back(1e3 * (record.chunk_s[t] - record.chunk_s[t - 1]));
    if (gaps.empty()) continue;
    run.gaps_ms.insert(run.gaps_ms.end(), gaps.begin(), gaps.end());
    run.tpot_ms.push_back(summarize(gaps).mean);
    std::sort(gaps.begin(), gaps.end(), std::greater<>());
    gaps.resize((gaps.size() + 9) / 10);
    run.tail_ms.push_back(summarize(gaps).mean);
  }
  run.hit_share = cached / double(run.result.input_tokens);
  std::sort(run.gaps_ms.begin(), run.gaps_ms.end());
  return run;
}

Bed::Bed(const Setting& setting, std::vector<std::string> common) : setting_(setting), common_(std::move(common)) {}

Result<std::unique_ptr<Build>> Bed::make(const std::vector<std::string>& options) const {
  std::vector<std::string> words = common_;
  words.insert(words.end(), {"--device", setting_.device, "--load-format", "dummy"});
  words.insert(words.end(), options.begin(), options.end());
  Result<Options> parsed = Options::parse(option_table(), "serve", words, 1);
  if (!parsed) return parsed.error();
  if (Status status = check_options(parsed.value(), "serve"); !status) return status.error();
  Result<std::unique_ptr<Build>> build = make_build(parsed.value());
  if (build) (void)build.value()->cluster->start();  // with threads it cannot fail
  return build;
}

Result<std::string> Bed::open(const std::vector<std::string>& options) {
  // Prompts are longer than a chunk and a block, and pairs of them have a common prefix.
  std::vector<BenchRequest> questions = shared_prefix_load(6, 3, 70, 27, 9, 1).requests;
  const std::vector<double> together(questions.size(), 0.0);
  if (!has_plain_) {
    build_.reset();
    auto plain = make({"--topology", "1C", "--allocator", "contiguous", "--max-model-len", "256", "--batching",
                       "prefill_first", "--prefix-cache", "off", "--max-batch", "4"});
    if (!plain) return plain.error();
    Run run = run_load(*plain.value(), questions, {});
    if (!run.wrong.empty()) return "the plainest cluster: " + run.wrong;
    plain_hash_ = run.logits_hash;
    has_plain_ = true;
  }
  if (!build_ || options != options_) {
    build_.reset();
    auto made = make(options);
    if (!made) return made.error();
    build_ = std::move(made).value();
    options_ = options;
  }
  Run run = run_load(*build_, questions, together);
  for (const auto& instance : build_->cluster->instances()) instance->memory().clear_prefix_cache();
  if (!run.wrong.empty()) return run.wrong;
  if (run.logits_hash == plain_hash_) return std::string();
  char text[80];
  std::snprintf(text, sizeof text, "logits hash %016llx, the plainest cluster has %016llx",
                static_cast<unsigned long long>(run.logits_hash), static_cast<unsigned long long>(plain_hash_));
  return std::string(text);
}

Result<double> Bed::capacity(const std::vector<BenchRequest>& requests) {
  if (capacity_ > 0) return capacity_;
  build_.reset();
  auto plain = make({"--topology", "1C", "--prefix-cache", "off"});
  if (!plain) return plain.error();
  const std::vector<double> together(requests.size(), 0.0);
  run_load(*plain.value(), {requests.front()}, {});  // the first use of memory
  Run run = run_load(*plain.value(), requests, together);
  if (!run.wrong.empty()) return invalid("calibration: " + run.wrong);
  capacity_ = run.result.request_throughput;
  return capacity_;
}

Values run_values(const Run& run) {
  const BenchResult& r = run.result;
  Values values = {{"duration_s", r.duration_s},
                   {"input_tokens", r.input_tokens},
                   {"generated_tokens", r.output_tokens},
                   {"request_throughput", r.request_throughput},
                   {"output_throughput", r.output_throughput},
                   {"requests", run.ttft_ms.size()},
                   {"gaps", run.gaps_ms.size()}};
  for (auto [name, sample] : {std::pair{"ttft_ms", run.ttft_ms}, {"tpot_ms", run.tpot_ms}, {"itl_ms", run.gaps_ms}}) {
    std::sort(sample.begin(), sample.end());
    values[std::string("mean_") + name] = summarize(sample).mean;
    values[std::string("median_") + name] = percentile_seen(sample, 50);
  }
  values["p99_itl_ms"] = percentile_seen(run.gaps_ms, 99);
  for (double p : {5., 25., 75., 90., 95.}) {
    char name[32];
    std::snprintf(name, sizeof name, "itl_ms_p%g", p);
    values[name] = percentile_seen(run.gaps_ms, p);
  }
  values["longest_itl_ms"] = run.gaps_ms.empty() ? 0 : run.gaps_ms.back();
  values["tail_tbt_ms"] = summarize(run.tail_ms).mean;
  char hash[20];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(run.logits_hash));
  values["logits_hash"] = hash;
  return values;
}

}  // namespace xpyd::experiments
