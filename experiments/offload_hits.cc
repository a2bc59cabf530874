// offload_hits: How many requests a second are served by the share of hits: in the pool's own cache, in the host tier,
//   or with neither?
// Paper: light-vllm (wde), experiments 4 and 5; vLLM issue 10874.
// Set-up: requests per second by the share of prompts that a cache has: the pool (device), or the host tier alone
//   (host). llama-mini in f32; the link takes 1/5 of the prefill time, as for their 3B. /rounds: the same documents
//   asked again, when the pool holds them (fits), when only the host tier does (over), when neither does (overrun), and
//   from a disk. There the link takes 1/12.4.
// Command: make exp-offload_hits (a minute; measured).
// Expected, hits: computing takes 185 (1 - h) + 18 ms and the link 37 h, so the link is hidden until h = .91. With all
//   hits host reaches 18 / 37 = .5 of device, and device is 203 / 18 = 11 times none. Expected, rounds: a document
//   takes 370 ms to compute, 30 to load, and 8 with its KV present: offload alone 6 to 13 times, prefix cache 25 to 45,
//   a disk at 80 to 400 MB/s 2 to 10. overrun: 16 documents in turn through an LRU tier of 7.5 find nothing: .9 to 1.1.
// Found: the tier equals the pool's cache up to .6 of hits and reaches .44 of it with all; it is 12 times as fast as no
//   cache.
#include <filesystem>

#include "experiments/offload.h"

namespace xpyd::experiments::offload_hits_experiment {
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

Values row_of(const Run& run, const OffloadStats& before, const OffloadStats& after) {
  return {{"requests_per_s", run.result.request_throughput},
          {"seconds", run.result.duration_s},
          {"mean_ttft_ms", run.result.ttft_ms.mean},
          {"hit_share", run.hit_share},
          {"host_hit_tokens", after.host_hit_tokens - before.host_hit_tokens},
          {"load_wait_ms", 1e3 * (after.load_wait_seconds - before.load_wait_seconds)},
          {"logits_hash", hash_text(run.logits_hash)}};
}

constexpr double kHits[] = {0, 0.6, 1};

std::vector<Values> hits_points(const Setting&) {
  return {{{"cache", "none"}, {"link_times", 0}},
          {{"cache", "device"}, {"link_times", 0}},
          {{"cache", "host"}, {"link_times", 5}}};
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
      // Prompts with this cached share. Each has its own beginning and a new tail.
      const int known = int(kHits[i] * tokens) / 16 * 16, tail = tokens - known;
      std::vector<BenchRequest> prompts, beginnings;
      for (int k = 0; k < n; ++k) {
        const int number = int(i) * n + k;
        beginnings.push_back(document(setting.seed, number, known + 1, 1));
        prompts.push_back(document(setting.seed, number, known, output, tail, number));
      }
      const std::vector<double> together(prompts.size(), 0.0);
      if (known > 0 && point["cache"] != "none")
        if (Run first = run_load(bed->build(), beginnings, together); !first.wrong.empty())
          return Finding{{}, first.wrong};
      const OffloadStats before = tier_stats(*bed);
      Run run = run_load(bed->build(), prompts, together);
      if (!run.wrong.empty()) return Finding{{}, run.wrong};
      Values row = {{"hits", kHits[i]}, {"copy_gbps", std::stod(gbps.value())}};
      row.update(row_of(run, before, tier_stats(*bed)));
      found.rows.push_back(row);
    }
    return found;
  };
}

REGISTER_EXPERIMENT("offload_hits", "cpu", hits_points, hits_open);

struct Scene {
  int tokens, rounds, output;
  double pool, host, link_times;  // pool, host: number of documents that they hold
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
  for (const char* cache : {"none", "device", "host"}) add("fits", 4, cache, "lru");
  add("over", 4, "both", "lru");
  add("disk", 4, "disk", "lru");
  const int documents = setting.tiny ? 4 : 16;
  for (const char* cache : {"none", "both"}) add("overrun", documents, cache, "lru");
  return all;
}

Measure rounds_open(const Setting& setting) {
  auto bed = std::make_shared<Bed>(setting, common_options(setting, setting.tiny ? 128 : 1152, 2));
  return [=](const Values& point) -> Result<Finding> {
    const Scene scene = scene_of(point["scene"], setting.tiny);
    const int documents = point["documents"];
    Result<std::string> gbps = slow_link(*bed, setting, scene.link_times);
    if (!gbps) return gbps.error();
    // In whole blocks of 16 tokens: the document, its output and one more block for decode.
    const size_t block = 16 * token_kv_bytes(setting);
    auto bytes = [&](double held) { return std::to_string(size_t(held * (scene.tokens / 16 + 1)) * block); };
    std::vector<std::string> options = cache_options(point);
    options.insert(options.end(), {"--kv-bytes", bytes(scene.pool)});
    if (has_host(point))
      options.insert(options.end(), {"--host-kv-bytes", bytes(scene.host), "--kv-copy-gbps", gbps.value(),
                                     "--host-eviction", point["eviction"]});
    if (scene.disk > 0) {  // below build/ in a tree; an unpacked bundle may write where it lies
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
    // Without a cache both rounds are equal, so of two only the last runs.
    const int first = scene.rounds == 2 && point["cache"] == "none" ? 2 : 1;
    for (int round = first; round <= scene.rounds; ++round) {
      const OffloadStats before = tier_stats(*bed);
      Run run = run_load(bed->build(), prompts, together);
      if (!run.wrong.empty()) return Finding{{}, run.wrong};
      Values row = {{"round", round}, {"tokens", scene.tokens}, {"copy_gbps", std::stod(gbps.value())}};
      row.update(row_of(run, before, tier_stats(*bed)));
      found.rows.push_back(row);
    }
    return found;
  };
}

REGISTER_EXPERIMENT("offload_hits/rounds", "cpu", rounds_points, rounds_open);

}  // namespace
}  // namespace xpyd::experiments::offload_hits_experiment
