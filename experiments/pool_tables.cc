// pool_tables: wde's tables of KV offloading (light-vllm), at their sizes, with the pool as one more place where a
// prefix can be: another instance, from which it is fetched (--kv-fetch always, cost).
//
// The simulator (experiments/simulate/) with the costs of the machine on which they were published: Qwen2.5-3B and -7B
// in 16 bit, 0.8 TB/s, blocks of 16 tokens, steps of 1,024. A step costs its products and reading the weights, one
// after the other; 8,192 tokens then take the published 0.40 s (3B) and 0.84 (7B) at 179 and 200 TFLOP/s, more than
// that card has, which does both at once. A tier is read at what copies of a block's layer of 2.1 us each make of a
// link of 12 GB/s: 3.9 GB/s (3B), 7.8 (7B). The pool is read over a link of 100 Gb/s between two such machines, in
// whole blocks: 12.5 GB/s. Caches: `none`; `device`: its own memory holds all; `host`: that holds no more than what
// runs, and a tier below it all; `always`, `cost`: the other instance's memory holds all, its own nothing before the
// request.
//
// `hits` (experiment 4): 1,000 prompts of 1,000 tokens of which a share is known, 24 out, 32 clients who ask one after
// the other, 3B; eleven shares. Arithmetic. A prompt's KV is 37 MB: 9.4 ms from the tier, 2.9 from the pool; computing
// it 42 ms, decoding some 8 of a step that 32 share. The link is the limit where it takes longer than the rest: for the
// tier from 98 % on, for the pool nowhere: pool / device 0.9 to 1.02 at every share (a prompt waits for its own fetch,
// but 31 others run), host / device 0.95 to 1.02 up to 80 % and 0.6 to 1.02 at all. All hits / none 3.5 to 6.5.
//
// `outputs` (experiment 5): 10 documents of 10,240 tokens, all known, 2 clients, 7B, seven lengths of the answer.
// Arithmetic. A document is 587 MB: 75 ms from the tier, 47 from the pool; 1.05 s to compute; a step 19 ms, shared
// by 2. Two tokens: none 0.9 /s, device 50, the tier 10 to 13, the pool 15 to 21. 128 tokens take 1.2 s of steps for
// each client: none 0.4 to 0.5, all others 1.4 to 1.65 times that (published 0.45, and 0.78 to 0.81: 1.73 to 1.8). So
// what the cache's place is worth ends where answers are long.
#include <algorithm>
#include <string>
#include <vector>

#include "experiments/simulated.h"

namespace xpyd::experiments::pool_tables_experiment {
namespace {

using namespace disagg;

constexpr int kBlock = 16;
constexpr double kCallS = 2.1e-6, kCopyBytesPerS = 12e9, kPoolBytesPerS = 12.5e9;

struct Scene {
  int prompts, tokens, clients;
  bool large;
};
Scene scene_of(const std::string& scene, bool tiny) {
  if (tiny) return {4, 64, 2, scene == "outputs"};
  return scene == "hits" ? Scene{1000, 1000, 32, false} : Scene{10, 10240, 2, true};
}

SimulatedModel qwen(bool large) {
  SimulatedModel m{
      .name = large ? "Qwen2.5-7B" : "Qwen2.5-3B", .n_layers = large ? 28 : 36, .n_heads = large ? 28 : 16};
  m.head_dim = 128;
  m.active_parameters = m.parameters = large ? 7.62e9 : 3.09e9;
  m.kv_elements = 2. * (large ? 4 : 2) * m.head_dim;
  return m;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* cache : {"none", "device", "host", "always", "cost"}) {
    for (int tenth = 0; tenth <= 10; ++tenth)
      if (tenth == 0 || *cache != 'n')
        all.push_back({{"scene", "hits"}, {"cache", cache}, {"hits", tenth / 10.}, {"output", 24}});
    for (int output : {2, 4, 8, 16, 32, 64, 128})
      all.push_back({{"scene", "outputs"}, {"cache", cache}, {"hits", 1.}, {"output", output}});
  }
  return all;
}

// First what is known, to instance 0; long after it the prompts, to instance `where`.
struct Asked {
  size_t known = 0;
  int where = 0;
} asked;

Placement place(const ClusterView& view, const PlacementOptions&) {
  const int to = view.number < asked.known ? 0 : asked.where;
  return {.prefill = to, .decode = to};
}

Trace prompts_of(const Scene& scene, double hits, int output, bool warm) {
  constexpr double kLater = 1e5;  // seconds
  Trace trace{.block_tokens = kBlock, .closed_loop = true};
  const int known = int(hits * scene.tokens) / kBlock;
  const auto add = [&](double at_s, int number, int tokens, int out, bool is_known) {
    TraceRequest request{.arrival_s = at_s, .prompt_tokens = tokens, .output_tokens = out};
    for (int block = 0; block * kBlock < tokens; ++block)
      request.blocks.push_back(uint64_t(number + 1) << 32 |
                               uint64_t(block < known ? 0
                                        : is_known    ? 1
                                                      : 2)
                                   << 16 |
                               uint64_t(block));
    trace.requests.push_back(std::move(request));
  };
  if (warm && known > 0)
    for (int i = 0; i < scene.prompts; ++i) add(0, i, known * kBlock + 1, 1, true);
  const int first = int(trace.requests.size());
  for (int i = 0; i < scene.prompts; ++i) {
    add(kLater, i, scene.tokens + 1, output, false);
    if (i >= scene.clients) trace.requests.back().after = first + i - scene.clients;
  }
  return trace;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string cache = point["cache"];
  const Scene scene = scene_of(point["scene"], setting.tiny);
  const bool pool = cache == "always" || cache == "cost";
  const Trace trace = prompts_of(scene, point["hits"], point["output"], cache != "none");
  Result<SimulationOptions> options = simulated("h100x1", "llama-3-8b", pool ? "2C" : "1C", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  o.model = qwen(scene.large);
  const double copies = 2. * o.model.n_layers, copy_bytes = kBlock * o.model.kv_token_bytes() / copies;
  o.hardware = {.name = "theirs", .bytes_per_s = .8e12, .memory_bytes = 1e13, .mfu = 1, .mbu = 1, .step_s = 0};
  o.hardware.flops_per_s = scene.large ? 200e12 : 179e12;
  o.hardware.link_bytes_per_s = kPoolBytesPerS;
  o.hardware.host_bytes_per_s = copy_bytes / std::max(kCallS, copy_bytes / kCopyBytesPerS);
  o.hardware.host_bytes = 1e13;
  set_step_tokens(o, 1024);
  o.engine.max_batch = scene.clients;
  const double longest = scene.tokens + 2 * kBlock + int(point["output"]), all = 1.1 * scene.prompts * longest;
  o.kv_tokens = cache == "host" ? 2 * scene.clients * longest : 2 * all;
  o.host_tokens = cache == "host" ? all : 0;
  asked = {.known = trace.requests.size() - size_t(scene.prompts), .where = pool ? 1 : 0};
  PlacementPolicy policy = *find_placement_policy("least_loaded");
  policy.place = place;
  o.conductor.placement = &policy;
  o.conductor.fetch = find_fetch_policy(pool ? cache : "never");
  Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  const Simulation& done = simulation.value();
  Finding found;
  found.wrong = unserved(done, trace);
  double begun_s = kNever, ended_s = 0, cached = 0, prompt = 0, ttft_s = 0;
  for (size_t i = asked.known; i < done.records.size(); ++i) {
    const SimulatedRecord& r = done.records[i];
    begun_s = std::min(begun_s, r.arrival_s), ended_s = std::max(ended_s, r.last_s);
    cached += r.cached, prompt += r.prompt, ttft_s += (r.times.first_s - r.arrival_s) / scene.prompts;
  }
  found.rows.push_back({{"requests_per_s", scene.prompts / (ended_s - begun_s)},
                        {"hit_share", cached / prompt},
                        {"ttft_mean_s", ttft_s},
                        {"fetches", done.fetches_s.size()}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("pool_tables", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pool_tables_experiment
