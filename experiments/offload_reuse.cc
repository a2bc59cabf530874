// offload_hits: requests a second by the share of the prompts that a cache has: in the pool, or in
// the host tier. offload_rounds: the same documents asked again, when the pool holds them, when
// only the host tier does, and when neither does.
//
// Real steps of llama-mini in f32, one instance, both cores. A GPU computes KV a few times as slowly as its link copies
// it, this machine some hundred times (offload_cost). So that a link can be the limit at all, most points have one that
// takes 1 / `link_times` of the prefill's time (offload.h); 0: as fast as memory. Caches: `none`; `device`: the pool's
// prefix cache; `host`: the tier alone, the pool finds nothing by itself; `both`.
//
// offload_hits (E4; published: the host tier is as good as the GPU's own cache below 80 % of hits, and falls behind
// above, where nothing is left to overlap with; 20.6 requests/s with no hits, 98.8 with all). 8 prompts of 512 tokens,
// each with its own prefix, 8 tokens of output, 4 at once; the link takes 1/5 of the prefill, as their 3B's.
// Arithmetic. With a share h of hits, computing takes 185 (1 - h) + 18 ms a request (8 steps of 9 ms, shared by 4), the
// link 37 h: it is hidden until 185 (1 - h) + 18 = 37 h, h = 0.91. So host / device is 0.88 to 1.05 up to 60 % (the
// first load is waited for, and 4 at once is not a long queue), and 18 / 37 = 0.5 at 100 %, 0.3 to 0.75. At memory's
// speed 1, less the copying itself: 0.85 to 1.1. All hits over none, device: 203 / 18 = 11.
//
// offload_rounds. `fits` and `over` (E5; published, 10 x 10,240 tokens that fit the GPU, 2 tokens
// of output, rounds 2 and 3: none 0.91 requests/s, prefix cache 49.96, both 49.22, offload
// alone 9.23; round 1 alike): 4 documents of 1,024 tokens, 2 at once; the pool holds all of them,
// or 2 and a half; the host tier 8. The link takes 1/12.4 of the prefill (their 1.09 s against
// 0.088). Arithmetic. A document takes 370 ms to compute, 30 to load, 8 with its KV in the pool (2
// steps of 8 ms, shared by 2). Offload alone: 12 times none less the steps, 6 to 13. Prefix cache:
// 25 to 45 times. In `over` documents come in turn, so LRU has always thrown out the next one:
// prefix cache 1 time, both as offload alone. `disk`: neither pool nor host holds more than two and
// a half, a disk holds all (their tier below the CPU's is 3 to 4 times as slow). A document is 8
// MB, direct reads of this machine's disk are 80 to 400 MB/s: 20 to 105 ms, with the link 50 to
// 135, of two at once partly beside the other's: 2 to 10 times none. Round 1 with a tier: 0.94
// to 1.03 of none. `overrun` (vLLM #10874, 8, 16, 32, 64 documents, seconds:
// none 13.66, 27.28, 54.54, 109.27; prefix cache 0.49, 7.22, 49.96, 126.08; and a CPU tier of 30
// documents 0.5, 2.3, 17.26, 110.96): 2, 4, 8, 16 documents of 256 tokens; the pool holds 5 with
// those that run, the tier 7 and a half. Arithmetic. 16 in turn through 7.5 under LRU: the next one
// is always gone, time / none = 0.9 to 1.1. 8: every one has lost a 16th to a half of its end: 0.05
// to 0.65. length_aware gives up the ends first, so that of 16 each keeps 7.5 / 16 of itself: 0.53,
// and its loads: 0.5 to 0.75. lfu is lru here: all are used as often.
#include <algorithm>
#include <filesystem>

#include "experiments/offload.h"

namespace xpyd::experiments::offload_reuse_experiment {
namespace {

std::vector<std::string> cache_options(const Values& point) {
  const std::string cache = point["cache"];
  return {"--topology", "1C", "--prefix-cache", cache == "device" || cache == "both" ? "on" : "off"};
}
bool has_host(const Values& point) { return point["cache"] != "none" && point["cache"] != "device"; }

std::vector<std::string> common_options(const Setting& setting, int max_model_len, int max_batch) {
  return {offload_model(setting), "--chunk-tokens",         "512", "--max-model-len", std::to_string(max_model_len),
          "--max-batch",          std::to_string(max_batch)};
}

Values row_of(const Run& run, const KvTierStats& before, const KvTierStats& after) {
  return {{"requests_per_s", run.result.request_throughput},
          {"seconds", run.result.duration_s},
          {"mean_ttft_ms", run.result.ttft_ms.mean},
          {"hit_share", run.hit_share},
          {"host_hit_tokens", after.host_hit_tokens - before.host_hit_tokens},
          {"bytes_in", after.bytes_in - before.bytes_in},
          {"copies_in", after.copies_in - before.copies_in},
          {"load_wait_ms", 1e3 * (after.load_wait_seconds - before.load_wait_seconds)},
          {"logits_hash", hash_text(run.logits_hash)}};
}

// ---- offload_hits

constexpr double kHits[] = {0, 0.2, 0.4, 0.6, 0.8, 1};

std::vector<Values> hits_points(const Setting& setting) {
  std::vector<Values> all = {{{"cache", "none"}, {"link_times", 0}},
                             {{"cache", "device"}, {"link_times", 0}},
                             {{"cache", "host"}, {"link_times", 5}}};
  if (!setting.tiny) all.push_back({{"cache", "host"}, {"link_times", 0}});
  return all;
}

Measure hits_open(const Setting& setting) {
  const int max_len = setting.tiny ? 128 : 1024;
  auto bed = std::make_shared<Bed>(setting, common_options(setting, max_len, 4));
  return [=](const Values& point) -> Result<Finding> {
    const int n = setting.tiny ? 3 : 8, tokens = setting.tiny ? 64 : 512, output = setting.tiny ? 2 : 8;
    Result<std::string> gbps = slow_link(*bed, setting, point["link_times"]);
    if (!gbps) return gbps.error();
    std::vector<std::string> options = cache_options(point);
    options.insert(options.end(), {"--kv-bytes", setting.tiny ? "4MiB" : "256MiB"});
    if (has_host(point))
      options.insert(options.end(),
                     {"--host-kv-bytes", setting.tiny ? "4MiB" : "256MiB", "--kv-copy-gbps", gbps.value()});
    Result<std::string> wrong = bed->open(options);
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    Finding found;
    for (size_t i = 0; i < std::size(kHits); ++i) {
      if (point["cache"] == "none" && i > 0) break;  // nothing can be found
      // Prompts of which so much is known: each has its own beginning, and a tail that is new.
      const int known = int(kHits[i] * tokens) / 16 * 16, tail = tokens - known;
      std::vector<BenchRequest> prompts, beginnings;
      for (int k = 0; k < n; ++k) {
        const int number = int(i) * n + k;
        beginnings.push_back(document(setting.seed, number, known + 1, 1));
        prompts.push_back(document(setting.seed, number, known, output, tail, number));
      }
      const std::vector<double> together(prompts.size(), 0.0);
      if (known > 0 && point["cache"] != "none")
        if (Run first = run_load(bed->stack(), beginnings, together); !first.wrong.empty())
          return Finding{{}, first.wrong};
      const KvTierStats before = tier_stats(*bed);
      Run run = run_load(bed->stack(), prompts, together);
      if (!run.wrong.empty()) return Finding{{}, run.wrong};
      Values row = {{"hits", kHits[i]}, {"copy_gbps", std::stod(gbps.value())}};
      row.update(row_of(run, before, tier_stats(*bed)));
      found.rows.push_back(row);
    }
    return found;
  };
}

REGISTER_EXPERIMENT("offload_hits", "cpu", hits_points, hits_open);

// ---- offload_rounds

struct Scene {
  int tokens, rounds, output;
  double pool, host, link_times;  // pool, host: documents that they hold
  double disk = 0;
};
Scene scene_of(const std::string& scene, bool tiny) {
  Scene s = scene == "fits"   ? Scene{1024, 3, 2, 6, 8, 12.4}
            : scene == "over" ? Scene{1024, 3, 2, 2.5, 8, 12.4}
            : scene == "disk" ? Scene{1024, 3, 2, 2.5, 2.5, 12.4, 12}
                              : Scene{256, 2, 2, 5, 7.5, 12.4};
  if (tiny) s.tokens = 64;
  return s;
}

std::vector<Values> rounds_points(const Setting& setting) {
  std::vector<Values> all;
  auto add = [&](const char* scene, int documents, const char* cache, const char* eviction) {
    all.push_back({{"scene", scene}, {"documents", documents}, {"cache", cache}, {"eviction", eviction}});
  };
  for (const char* cache : {"none", "device", "both", "host"}) add("fits", 4, cache, "lru");
  for (const char* cache : {"device", "both"}) add("over", 4, cache, "lru");
  add("disk", 4, "disk", "lru");
  for (int documents : setting.tiny ? std::vector{4} : std::vector{2, 4, 8, 16}) {
    for (const char* cache : {"none", "device", "both"}) add("overrun", documents, cache, "lru");
    if (documents < 16 && !setting.tiny) continue;
    for (const char* eviction : {"lfu", "length_aware"}) add("overrun", documents, "both", eviction);
  }
  return all;
}

Measure rounds_open(const Setting& setting) {
  auto bed = std::make_shared<Bed>(setting, common_options(setting, setting.tiny ? 128 : 1152, 2));
  return [=](const Values& point) -> Result<Finding> {
    const Scene scene = scene_of(point["scene"], setting.tiny);
    const int documents = point["documents"];
    Result<std::string> gbps = slow_link(*bed, setting, scene.link_times);
    if (!gbps) return gbps.error();
    // In whole blocks of 16 tokens: a document and its output, one more for the room to decode.
    const size_t block = 16 * token_kv_bytes(setting);
    auto bytes = [&](double held) { return std::to_string(size_t(held * (scene.tokens / 16 + 1)) * block); };
    std::vector<std::string> options = cache_options(point);
    options.insert(options.end(), {"--kv-bytes", bytes(scene.pool)});
    if (has_host(point))
      options.insert(options.end(), {"--host-kv-bytes", bytes(scene.host), "--kv-copy-gbps", gbps.value(),
                                     "--host-eviction", point["eviction"]});
    if (scene.disk > 0) {  // where a build is, below it; a bundle is unpacked where it may write
      const std::string folder = std::filesystem::is_directory("build") ? "build" : ".";
      options.insert(options.end(), {"--disk-kv-dir", folder, "--disk-kv-bytes", bytes(scene.disk)});
    }
    Result<std::string> wrong = bed->open(options);
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    std::vector<BenchRequest> prompts;
    for (int i = 0; i < documents; ++i) prompts.push_back(document(setting.seed, i, scene.tokens + 1, scene.output));
    const std::vector<double> together(prompts.size(), 0.0);
    Finding found;
    // Without a cache one round is like the other: of two only the last.
    const int first = scene.rounds == 2 && point["cache"] == "none" ? 2 : 1;
    for (int round = first; round <= scene.rounds; ++round) {
      const KvTierStats before = tier_stats(*bed);
      Run run = run_load(bed->stack(), prompts, together);
      if (!run.wrong.empty()) return Finding{{}, run.wrong};
      Values row = {{"round", round}, {"tokens", scene.tokens}, {"copy_gbps", std::stod(gbps.value())}};
      row.update(row_of(run, before, tier_stats(*bed)));
      found.rows.push_back(row);
    }
    return found;
  };
}

REGISTER_EXPERIMENT("offload_rounds", "cpu", rounds_points, rounds_open);

}  // namespace
}  // namespace xpyd::experiments::offload_reuse_experiment
