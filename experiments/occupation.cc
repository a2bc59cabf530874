// occupation: what KV costs in GB s (the integral of its bytes over time, Mooncake's VRAM occupation cost) where
// prompts are computed in chunks beside decodes, and where prefill and decode are apart; by phase, as /metrics tells it
// (kv_occupation_gb_seconds_total).
//
// The simulator (experiments/simulate/): two instances of 8 x A800 with Llama-3-70B: 2C with chunks of 512 and of 2,048
// tokens beside the decodes, or 1P1D, whose P takes whole prompts of up to 32,768 tokens in a step or chunks of 2,048,
// layer by layer, or D reads when P is done (pull); 100 Gb/s. Prompts of 8,192 tokens (2.7 GB of KV), answers of 256,
// Poisson, 300 requests, three draws; `load` is a share of what two instances compute of both.
//
// Arithmetic. A prompt alone takes 1.15 s of products and attention; steps of 512 are 16 that read the weights again
// (12.4 ms each) and have up to 20 decodes beside them (6 ms): 1.4 to 1.5 s; while it grows it holds half of its KV on
// average: 1.45 / 2 x 2.7 = 1.9 GB s. P in steps of 2,048: 4 x 12.9 + 1.14 = 1.19 s, of .25, .5, .75 and all of it:
// 2.0 GB s, as blocks are taken at the beginning of a step. A whole prompt holds all for 1.15 s: 3.1. So chunks inline
// cost no more in prefill than P does: 0.9 to 1.3 of it. What P adds is D's room, which is held from before the prompt
// is computed until its KV has come (push): 2.7 GB for 1.2 s and a queue: 3 to 8 GB s of transfer; pull holds both
// sides for the .21 s that 2.7 GB take: .6 each. Decode is where chunks cost: a decode step beside a chunk of 512 takes
// 79 ms and more, for 13 + n x .4: 256 tokens of 2.75 GB last 256 x 20 ms = 5 s on D, 14 GB s, and, beside chunks in
// load x .9 of all steps, 2.5 to 5 times as long.
#include "base/random.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::occupation_experiment {
namespace {

using namespace disagg;

constexpr int kPrompt = 8192, kOutput = 256, kDraws = 3;
constexpr double kRequestsPerS = 1.2;  // of two instances, prompts and answers

struct System {
  const char* name;
  const char* topology;
  int step_tokens;
  bool pull;
};
constexpr System kSystems[] = {{"chunks of 512", "2C", 512, false},
                               {"chunks of 2048", "2C", 2048, false},
                               {"P and D", "1P1D", 2048, false},
                               {"P and D, whole", "1P1D", 32768, false},
                               {"P and D, pull", "1P1D", 2048, true}};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const System& system : kSystems)
    for (double load : {0.3, 0.5, 0.7})
      for (int draw = 0; draw < kDraws; ++draw)
        all.push_back({{"system", system.name}, {"load", load}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const System& system = *std::ranges::find_if(kSystems, [&](const System& s) { return point["system"] == s.name; });
  const int n = setting.tiny ? 12 : 300, draw = point["sample"];
  Random random(setting.seed + 31 + 1000 * uint64_t(draw));
  Trace trace{.block_tokens = 64};
  double now_s = 0;
  for (int i = 0; i < n; ++i)
    add_request(trace, now_s += random.exponential() / (double(point["load"]) * kRequestsPerS),
                setting.tiny ? 512 : kPrompt, setting.tiny ? 20 : kOutput);
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", system.topology, trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  set_step_tokens(o, system.step_tokens);
  o.conductor.placement = find_placement_policy("least_loaded");
  o.conductor.disagg_options.pull = system.pull;
  o.conductor.stream_kv = StreamKv::layer;
  const Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  const Simulation& run = simulation.value();
  Finding found{{}, unserved(run, trace)};
  if (!found.wrong.empty()) return found;
  double ttft = 0, tbt = 0;
  for (const SimulatedRecord& r : run.records) ttft += r.times.first_s - r.arrival_s, tbt += r.times.worst_tenth();
  const double prompt = run.prompt_phase_gb_s / n, decode = run.decode_phase_gb_s / n,
               transfer = run.transfer_phase_gb_s / n;
  found.rows.push_back({{"prefill_gb_s", prompt},
                        {"decode_gb_s", decode},
                        {"transfer_gb_s", transfer},
                        {"gb_s", prompt + decode + transfer},
                        {"ttft_s", ttft / n},
                        {"tail_tbt_s", tbt / n}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("occupation", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::occupation_experiment
