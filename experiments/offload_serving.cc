// offload_overhead: what does copying every block out to the host tier cost those who compute?
//
// Real steps of llama-mini in f32, one instance, both cores. Two clusters are open at once and take
// turns within a point, so that both see the same machine. `link_times`: the KV of a prompt is
// copied in that part of the time in which it is computed (offload.h); 0: as fast as memory.
//
// offload_overhead (E3; published: 0.94 to 1.02 of the requests a second, 3B): prompts of 512 tokens, one after the
// other, one token of output; all of their KV goes out, none comes back. Arithmetic. A prompt is 4 MiB of KV: 0.4 to
// 1.3 ms of a copying thread that shares two cores with 185 ms of prefill. In balance that is 0.1 to 0.35 %; the two
// who compute wait for each other, so up to 0.7 %. And 32 blocks of 1 to 5 us of the engine's thread, 0.1 %, and what
// it finds no more in its caches. So 0.98 to 1; below, the machine's own wavering: turns of three prompts, of which the
// median counts. `cpu_ratio` is the same of processor time, spinning included, which wavers less: whatever keeps the
// two cores longer is in it. Where the link takes a fifth of the prefill, a copy that is waited for would cost 1 / 1.2
// = 0.83; it is not, and takes no core: 1. `waits` shows it: the same with copies that the engine waits for, 0.79 to
// 0.88. (Nobody has published that: all of wde's copies are asynchronous.)
//
// Published are two ways to step, "sync" (plan, compute, choose, one after the other) and "async-2"
// (two steps under way: the next is planned while one computes); here `ahead`, which is
// --async-scheduling. It needs a model that computes elsewhere and chooses by itself. A CPU's takes
// the engine's own thread and both cores: planning has nothing to hide behind, so this axis is for
// a card alone: Llama-3.1-8B's shape in bf16, prompts of 4,096 tokens. Arithmetic, H200. A step of
// 1,024 tokens is 16.4 TFLOP at some 400 TFLOP/s, 41 ms, its KV 134 MB: 3 ms of a 50 GB/s link; a
// step of 128 is 5 ms, of 32 the 4 ms of reading 16 GB of weights. What the engine's thread has to
// do for a copy, 1 to 5 us for each of 64, 8 or 2 blocks and 5 to 20 us for the call, is 0.02 to
// 0.3 ms: in sync it adds to the step, 0.1 to 4 %: 0.94 to 1.01; in async-2 the card does not wait
// for it: 0.97 to 1.02. Without the tier async-2 saves what planning and launching take, 0.1 to 1
// ms of 4 at 32 tokens: 1.02 to 1.35 of sync (published: 0.39 / 0.30).
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/stats.h"
#include "experiments/offload.h"

namespace xpyd::experiments::offload_serving_experiment {
namespace {

// Two clusters over the same model, and the link between them and the host.
struct Pair {
  Pair(const Setting& setting, const std::vector<std::string>& common)
      : without(setting, common), with(setting, common) {}
  Bed without, with;
};

// ---- offload_overhead

// Of all threads of this process.
double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

struct OverheadSizes {
  int prompt, prompts, turns;
  Dtype kv;
  std::vector<std::string> common;
  const char* host;
};
OverheadSizes overhead_sizes(const Setting& setting) {
  if (setting.tiny) return {64, 2, 1, Dtype::f32, {offload_model(setting), "--kv-bytes", "4MiB"}, "4MiB"};
  if (setting.device == "cuda")
    return {4096,
            3,
            5,
            Dtype::bf16,
            {"experiments/models/llama-8b", "--dtype", "bf16", "--kv-dtype", "bf16", "--kv-bytes", "4GiB",
             "--max-model-len", "8192"},
            "8GiB"};
  return {512, 3, 9, Dtype::f32, {offload_model(setting), "--kv-bytes", "64MiB", "--max-model-len", "1024"}, "256MiB"};
}

std::vector<Values> overhead_points(const Setting& setting) {
  std::vector<Values> all;
  auto add = [&](int chunk, int times, bool waits, bool ahead = false) {
    all.push_back(
        {{"chunk", chunk}, {"link_times", times}, {"waits", waits ? "on" : "off"}, {"ahead", ahead ? "on" : "off"}});
  };
  if (setting.device == "cuda") {
    for (int chunk : setting.tiny ? std::vector{32} : std::vector{1024, 128, 32})
      for (bool ahead : {false, true}) add(chunk, 0, false, ahead);
    return all;
  }
  for (int chunk : setting.tiny ? std::vector{32} : std::vector{512, 128, 32}) add(chunk, 0, false);
  for (int chunk : setting.tiny ? std::vector{32} : std::vector{512, 128}) add(chunk, 5, false);
  for (int times : {0, 5}) add(setting.tiny ? 32 : 128, times, true);
  return all;
}

Measure overhead_open(const Setting& setting) {
  const OverheadSizes sizes = overhead_sizes(setting);
  std::vector<std::string> common = sizes.common;
  common.insert(common.end(), {"--max-batch", "4", "--prefix-cache", "off"});
  const ModelConfig config = load_model_config(common[0]).value();
  const double token_bytes = double(kv_shape(config, sizes.kv).token_bytes());
  auto pair = std::make_shared<Pair>(setting, common);
  auto asked = std::make_shared<int>(0);
  return [=](const Values& point) -> Result<Finding> {
    const int n_tokens = sizes.prompt, n_prompts = sizes.prompts, turns = sizes.turns;
    Result<std::string> gbps = slow_link(pair->with, setting, point["link_times"]);
    if (!gbps) return gbps.error();
    std::vector<std::string> options = {"--topology",         "1C",          "--chunk-tokens", point["chunk"].dump(),
                                        "--async-scheduling", point["ahead"]};
    Result<std::string> wrong = pair->without.open(options);
    if (wrong && wrong.value().empty()) {
      options.insert(options.end(),
                     {"--host-kv-bytes", sizes.host, "--kv-copy-gbps", gbps.value(), "--kv-copy-wait", point["waits"]});
      wrong = pair->with.open(options);
    }
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    const KvTierStats before = tier_stats(pair->with);
    uint64_t hash[2] = {};
    Finding found;
    for (int turn = 0; turn < turns; ++turn) {
      std::vector<BenchRequest> prompts;
      for (int i = 0; i < n_prompts; ++i) prompts.push_back(document(setting.seed, (*asked)++, n_tokens, 1));
      double now[2] = {}, cpu[2] = {};
      for (int i = 0; i < 2; ++i) {
        const int tiers = (turn + i) % 2;
        const double before_s = cpu_seconds();
        Bed& bed = tiers ? pair->with : pair->without;
        Run run = run_load(bed.stack(), prompts, {});
        if (!run.wrong.empty()) return Finding{{}, run.wrong};
        now[tiers] = run.result.duration_s;
        hash[tiers] += run.logits_hash;
        // The last prompt's copy goes on: not during the other's turn.
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        cpu[tiers] = cpu_seconds() - before_s;
      }
      found.rows.push_back({{"copy_gbps", std::stod(gbps.value())},  // 0: no limit
                            {"sample", turn},
                            {"requests_per_s", n_prompts / now[0]},
                            {"requests_per_s_tiers", n_prompts / now[1]},
                            {"ratio", now[0] / now[1]},
                            {"cpu_ratio", cpu[0] / cpu[1]}});
    }
    if (hash[0] != hash[1]) return Finding{{}, "other logits with tiers than without"};
    const KvTierStats after = tier_stats(pair->with);
    const double n = turns * n_prompts, out = double(after.bytes_out - before.bytes_out);
    for (Values& row : found.rows)
      row.update({{"bytes_out_share", out / (n * n_tokens * token_bytes)},
                  {"dropped_blocks", after.dropped_out - before.dropped_out},
                  {"logits_hash", hash_text(hash[1])}});
    return found;
  };
}

REGISTER_EXPERIMENT("offload_overhead", "any", overhead_points, overhead_open);

}  // namespace
}  // namespace xpyd::experiments::offload_serving_experiment
