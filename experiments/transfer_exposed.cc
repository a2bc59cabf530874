// transfer_exposed: how much of a prompt's transfer its second token waits for, by the grain at
// which KV leaves the prefill instance (--stream-kv, --kv-transfer) and the rate of the wire.
//
// The simulator (experiments/simulate/): 1P1D, a prompt of 4,096 tokens of Llama-3.1-8B, in one step or
// in four of 1,024. `exposed_ms` is the gap between the first token, which P samples, and the second, less the same gap
// where what crosses is there; in `exposed_layers` its unit is the time that one layer's KV of the last step
// takes on the wire. `behind`: another prompt is computed on P right after it.
//
// Arithmetic. 4,096 tokens: 57 TFLOP in the matrices, 4 in attention, at 495 TFLOP/s 124 ms, a layer 3.9 ms. A layer's
// KV is 16.8 MB: 1.34 ms at 100 Gb/s, as long as its computation at 35. Layer by layer a wire faster than that has the
// last layer alone left when the computation ends: 1 layer less the 50 us in which P's word to D travels beside it
// (0.963 at 100 Gb/s, 0.851 at 400), at 25 Gb/s 32 - 31 x 3.9 / 5.4 = 9.5 of them (5.4
// of them where the step costs 148 ms, with its weights beside its products). By chunk, 32 layers of the last one
// are left; by request all 32 of four: 43 ms. At 1 Gb/s the transfer takes 4.3 s and nothing hides but the 0.12 s of
// computation. With another prompt behind it P looks at its wire between two layers of that one alone, up to 3.9 ms
// late (2.9 layers): so it delivers when the last post is posted, and D counts what arrives; the same 1 layer is left.
#include <algorithm>

#include "experiments/simulated.h"

namespace xpyd::experiments::transfer_exposed_experiment {
namespace {

using namespace disagg;

constexpr int kPrompt = 4096;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  const std::vector<double> rates = setting.tiny ? std::vector<double>{100}
                                                 : std::vector<double>{1, 5, 10, 25, 50, 100, 200, 400};
  for (int step : {1024, 4096})
    for (const char* grain : {"layer", "chunk", "request", "pull"})
      for (const char* behind : {"no", "yes"})
        for (double rate : rates)
          if (*behind == 'n' || rate == 100)
            all.push_back({{"grain", grain}, {"step", step}, {"behind", behind}, {"gbps", rate}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string grain = point["grain"];
  const int divide = setting.tiny ? 4 : 1, prompt = kPrompt / divide;
  Trace trace{.block_tokens = 16};
  add_request(trace, 0, prompt, 4);
  SimulationOptions options = simulated_h100("1P1D", trace);
  options.conductor.stream_kv = grain == "layer"   ? StreamKv::layer
                                : grain == "chunk" ? StreamKv::chunk
                                                   : StreamKv::request;
  options.conductor.disagg_options.pull = grain == "pull";
  set_step_tokens(options, int(point["step"]) / divide);
  options.kv_tokens = 16000;
  Finding found;
  const auto gap_s = [&](double bytes_per_s) {
    options.hardware.link_bytes_per_s = bytes_per_s;
    const Result<Simulation> run = simulate(options, trace);
    found.wrong = run ? unserved(run.value(), trace) : run.error().message;
    return found.wrong.empty() ? double(run.value().records[0].times.gaps[0]) : 0;
  };
  // Against an idle P: nothing crosses, and nobody has to look.
  const double without = gap_s(kNoWire);
  if (!found.wrong.empty()) return found;
  const double bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  if (point["behind"] == "yes") add_request(trace, 1e-3, prompt, 4);
  const double gap = gap_s(bytes_per_s);
  const int last = std::min(int(point["step"]) / divide, prompt);
  const double layer_s = options.model.kv_token_bytes() / options.model.n_layers * last / bytes_per_s;
  found.rows.push_back({{"first_gap_ms", 1e3 * gap},
                        {"no_wire_gap_ms", 1e3 * without},
                        {"exposed_ms", 1e3 * (gap - without)},
                        {"layer_ms", 1e3 * layer_s},
                        {"exposed_layers", (gap - without) / layer_s}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("transfer_exposed", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::transfer_exposed_experiment
