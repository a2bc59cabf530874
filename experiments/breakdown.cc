// breakdown: where the time of one long request goes, with 95 % of its prompt in another instance's memory and with
// nothing known (Mooncake, FAST'25, Fig. 14: stacked latencies of prompts of 8K to 128K, 128 tokens out).
//
// The simulator (experiments/simulate/): 2P1D of 8 x A800 with Llama-3-70B, nobody else there. One P has computed the
// prefix; the other one is asked, fetches it (--kv-fetch always), computes the rest and sends the KV to D layer by
// layer. `schedule`: the message to P. `fetch`: until the prefix is there; the prompt's steps wait for all of it, as
// the simulator's do. `prefill`: from then until its last step has ended. `exposed`: what the second token comes later
// than a step behind the first. `decode`: the rest. They are the request's time, with nothing left over.
//
// Arithmetic. 128K tokens are 18 PFLOP of products and 22 of attention, at 44 % of 8 x 312 TFLOP/s 37 s. Behind 95 % of
// them 6,554 tokens are 0.9 and 2.2: 2.9 s, 0.07 to 0.09 (published 0.08). The prefix is 41 GB: 0.41 s at 800 Gb/s, 1.6
// at 200, 3.3 at 100: the first token comes after 0.08 to 0.1, 0.11 to 0.13, 0.15 to 0.18 of the time (published 0.14:
// as over 150 Gb/s; what their load takes from DRAM into the cards is beside it, here it is not). At 8K attention is
// little: 0.05 to 0.09 of 1.1 s. By layer the last layer alone is exposed, and the last chunk's other layers where the
// link is slower than the step; what P fetched goes on to D as well, 43 GB in all, so at 100 Gb/s the link needs 3.4 s
// where the prompt needs 3: 0.3 to 0.6 s.
#include <algorithm>

#include "experiments/simulated.h"

namespace xpyd::experiments::breakdown_experiment {
namespace {

using namespace disagg;

constexpr int kBlock = 512, kOutput = 128;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (double gbps : {800., 200., 100.})
    for (int prompt : setting.tiny ? std::vector{8192} : std::vector{8192, 16384, 32768, 65536, 131072})
      for (double known : {0., .95}) all.push_back({{"gbps", gbps}, {"prompt", prompt}, {"known", known}});
  return all;
}

Placement place(const ClusterView& view, const PlacementOptions&) {
  return {.prefill = view.number == 0 ? 0 : 1, .decode = 2};
}

Result<Finding> run(const Values& point) {
  const int prompt = point["prompt"], known = int(double(point["known"]) * prompt) / kBlock * kBlock;
  constexpr double kLater = 1e4;  // seconds: the first one is long over
  Trace trace{.block_tokens = kBlock};
  for (const auto& [at_s, tokens, output] : {std::tuple(0., known + 1, 1), std::tuple(kLater, prompt, kOutput)}) {
    TraceRequest request{.arrival_s = at_s, .prompt_tokens = tokens, .output_tokens = output};
    for (int at = 0; at < tokens; at += kBlock)
      request.blocks.push_back(uint64_t(at + 1) | (at < known ? 0 : uint64_t(output) << 32));
    trace.requests.push_back(std::move(request));
  }
  Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "2P1D", trace);
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  o.hardware.link_bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  o.conductor.stream_kv = StreamKv::layer;
  PlacementPolicy policy = *find_placement_policy("least_loaded");
  policy.place = place;
  o.conductor.placement = &policy;
  o.conductor.fetch = find_fetch_policy("always");
  Result<Simulation> simulation = simulate(o, trace);
  if (!simulation) return simulation.error();
  Finding found;
  found.wrong = unserved(simulation.value(), trace);
  if (!found.wrong.empty()) return found;
  const SimulatedRecord& r = simulation.value().records[1];
  const std::vector<double>& fetches = simulation.value().fetches_s;
  const double fetch_s = fetches.empty() ? 0 : fetches.back(), schedule_s = o.message_s;
  const std::vector<float>& gaps = r.times.gaps;
  const double step_s = *std::ranges::min_element(gaps), exposed_s = std::max(0., double(gaps[0]) - step_s);
  found.rows.push_back({{"cached", r.cached},
                        {"schedule_s", schedule_s},
                        {"fetch_s", fetch_s},
                        {"prefill_s", r.times.first_s - r.arrival_s - schedule_s - fetch_s},
                        {"exposed_s", exposed_s},
                        {"decode_s", r.times.last_s - r.times.first_s - exposed_s},
                        {"ttft_s", r.times.first_s - r.arrival_s},
                        {"total_s", r.times.last_s - r.arrival_s}});
  return found;
}

Measure open(const Setting&) {
  return [](const Values& point) { return run(point); };
}

REGISTER_EXPERIMENT("breakdown", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::breakdown_experiment
