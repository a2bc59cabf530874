// The outcome of a simulation in numbers: the columns that scripts read.
#include <algorithm>
#include <cmath>

#include "base/json/json.h"
#include "base/numbers.h"
#include "base/siphash.h"
#include "experiments/simulate/cluster.h"

namespace xpyd::disagg {
namespace {

// Nearest rank; 0 if there are no values.
template <class T>
double percentile(std::vector<T>& values, double p) {
  if (values.empty()) return 0;
  const auto rank = long(std::ceil(p * double(values.size()))) - 1;
  const auto at = values.begin() + std::clamp(rank, 0L, long(values.size()) - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// A hash of every time that a client saw. Equal runs have equal hashes.
uint64_t hash_of(const Simulation& run) {
  std::string bytes;
  const auto add = [&bytes](const auto* data, size_t n) {
    bytes.append(reinterpret_cast<const char*>(data), n * sizeof *data);
  };
  for (const SimulatedRecord& r : run.records) {
    const double times[] = {r.arrival_s, r.times.first_s, r.last_s, double(r.cached), double(r.end)};
    add(times, std::size(times));
    add(r.times.gaps.data(), r.times.gaps.size());
  }
  return siphash({0, 0}, bytes);
}

}  // namespace

std::string result_json(const Simulation& run, const Objectives& objectives, double wall_s) {
  std::vector<double> ttft, worst_tenth;
  std::vector<float> gaps;
  int64_t completed = 0, failed = 0, hit = 0, prompt = 0, kept = 0;
  double ttft_sum = 0, last_s = 0;  // last_s: when the last request ended; later events concern no request
  for (const SimulatedRecord& r : run.records) {
    last_s = std::max(last_s, r.last_s);
    prompt += r.prompt;
    hit += r.cached;
    completed += r.end == SimulatedEnd::completed;
    failed += r.end == SimulatedEnd::failed;
    kept += r.end == SimulatedEnd::completed && r.times.keeps(objectives, r.arrival_s);
    if (r.times.first_s < 0) continue;
    ttft.push_back(r.times.first_s - r.arrival_s);
    ttft_sum += ttft.back();
    gaps.insert(gaps.end(), r.times.gaps.begin(), r.times.gaps.end());
    if (!r.times.gaps.empty()) worst_tenth.push_back(r.times.worst_tenth());
  }
  const double seconds = std::max(last_s, 1e-9);
  const ConductorStats& c = run.conductor;
  return JsonText()
      .object("requests", run.records.size(), "completed", completed, "rejected_early", run.conductor.refused_early,
              "rejected_late", run.conductor.refused_late, "failed", failed, "ttft_mean_s",
              ttft.empty() ? 0 : ttft_sum / double(ttft.size()), "ttft_p50_s", percentile(ttft, 0.5), "ttft_p90_s",
              percentile(ttft, 0.9), "ttft_p99_s", percentile(ttft, 0.99), "tbt_p50_s", percentile(gaps, 0.5),
              "tbt_p99_s", percentile(gaps, 0.99), "tbt_worst_tenth_p99_s", percentile(worst_tenth, 0.99), "hit_tokens",
              hit, "prompt_tokens", prompt, "fetched_tokens", run.fetched_tokens, "wasted_prefill_s",
              run.conductor.wasted_prefill_s, "prefill_busy_s", run.prefill_busy_s, "decode_busy_s", run.decode_busy_s,
              "kv_gb_s", run.prefill_gb_s + run.decode_gb_s, "goodput", double(kept) / seconds, "ttft_mape",
              c.ttft_error.mape(), "ttft_bias", c.ttft_error.bias(), "tbt_mape", c.tbt_error.mape(), "tbt_bias",
              c.tbt_error.bias(), "events", run.events, "wall_s", wall_s, "log_hash", hex(hash_of(run)))
      .take();
}

}  // namespace xpyd::disagg
