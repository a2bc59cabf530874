// prefix: what a shared prefix is worth: prompt tokens found in the cache, and the first token's time.
//
// Prompts of 1,024 tokens of which `share` is one of two prefixes, one request at a time, real
// steps of llama-mini in f32. Cache off beside it.
//
// Arithmetic. The first request of each of the two groups finds nothing, 22 of 24 find the prefix,
// in whole blocks of 16: hit share = 22/24 * share. The time to the first token is that of the
// tokens left, (1 - share), plus attention over the prefix: 1 - share of 2 * 25M FLOP a token,
// attention 8 layers * 4 * 512 * 512 = 8 MFLOP a token on average of a whole prompt's 50, so at
// 0.75: 0.25 + a little, below 0.35. Mooncake (FAST'25 Fig. 14) at 0.95 of 128K tokens: TTFT -86 %,
// so 0.14.
#include "base/stats.h"
#include "experiments/load.h"

namespace xpyd::experiments::prefix_experiment {
namespace {

constexpr double kShares[] = {0, 0.25, 0.5, 0.75, 0.9375};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* cache : {"on", "off"})
    for (double share : kShares)
      if (cache == std::string("on") ? !setting.tiny || share == 0.5 : share == 0.75)
        all.push_back({{"cache", cache}, {"share", share}});
  return all;
}

Measure open(const Setting& setting) {
  auto bed = std::make_shared<Bed>(
      setting, setting.tiny ? std::vector<std::string>{"experiments/models/llama-tiny", "--kv-bytes", "4MiB"}
                            : std::vector<std::string>{"experiments/models/llama-mini", "--kv-bytes", "256MiB",
                                                       "--max-model-len", "2048", "--max-batch", "16"});
  return [=](const Values& point) -> Result<Finding> {
    Result<std::string> wrong = bed->open(
        {"--topology", "1C", "--chunk-tokens", "512", "--prefix-cache", point["cache"]});
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    const int prompt = setting.tiny ? 128 : 1024, n = setting.tiny ? 4 : 24;
    const int shared = int(double(point["share"]) * prompt);
    const std::vector<BenchRequest> load = shared_prefix_load(n, 2, shared, prompt - shared, 2, setting.seed).requests;
    Run run = run_load(bed->stack(), load, {});
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
    char hash[20];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(run.logits_hash));
    const Summary hits = summarize(std::vector<double>(run.ttft_ms.begin() + 2, run.ttft_ms.end()));
    return Finding{{{{"hit_share", run.hit_share},
                     {"ttft_ms", hits.mean},  // of those that could find their prefix
                     {"ttft_ms_longest", hits.max},
                     {"first_ttft_ms", run.ttft_ms.front()},
                     {"logits_hash", hash}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("prefix", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::prefix_experiment
