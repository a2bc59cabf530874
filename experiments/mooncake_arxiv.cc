// What Mooncake's first paper (arXiv 2407.00079 v4) draws beside its serving figures: steps by length and batch (Fig.
// 2), lengths (Fig. 5) and uses of blocks (Fig. 6) of the traces, and what storing KV adds to a prompt, by request and
// by layer (Fig. 7). 8 x A800 with the shape of Llama-70B; where traces are read, the two that are released.
//
// Arithmetic. Fig. 2: a prompt of 4,096 tokens takes .527 s of products, .02 of attention and .013 to read weights:
// 7,300 tokens/s; one of 131,072 16.9 + 20.5 s: 3,500, .48 of it. A decode step is 12.9 ms to read weights, .13 ms a
// sequence and .12 for the KV of its 4,096 tokens: 13.1 ms at batch 1 and 28.6 at 64, so 29 times as many tokens/s.
// Fig. 6: the traces' notes have .758 and .584 of blocks asked for once, and block 0 in all 12,031 conversations.
// Fig. 7: 131,072 tokens are 42.9 GB: .336 s at the 128 GB/s between cards and host that FAST'25 states. The published
// .87 s are 49 GB/s. By layer the last of 80 is left: 42.9 / 80 / 49 = .011 s.
#include <algorithm>
#include <unordered_map>

#include "experiments/simulated.h"

namespace xpyd::experiments::mooncake_arxiv_experiment {
namespace {

using namespace disagg;

SimulationOptions a800(const std::string& topology, const Trace& trace) {
  return simulated("a800x8", "llama-3-70b", topology, trace).value();
}

namespace steps {
constexpr double kContext = 4096;  // of each sequence that decodes

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (int n = 256; n <= 1 << 17; n *= 2) all.push_back({{"phase", "prefill"}, {"n", n}});
  for (int n = 1; n <= 256; n *= 2) all.push_back({{"phase", "decode"}, {"n", n}});
  return all;
}

Result<Finding> run(const Values& point) {
  const SimulationOptions options = a800("1C", Trace{.block_tokens = 512});
  const double n = point["n"];
  StepShape step;
  if (point["phase"] == "prefill")
    step.add_prompt(n, 0);
  else
    step.add_decodes(n, n * kContext);
  const double s = step_cost(options.model, options.hardware).seconds(step);
  return Finding{{{{"step_s", s}, {"tokens_per_s", n / s}}}, ""};
}

Measure open(const Setting&) { return run; }
REGISTER_EXPERIMENT("mooncake_steps", "cpu", points, open);
}  // namespace steps

namespace traces {

std::vector<Values> points(const Setting& setting) {
  if (setting.traces.empty()) return {};
  return {{{"trace", "conversation"}}, {{"trace", "synthetic"}}};
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string name = point["trace"];
  const Result<Trace> trace =
      find_trace_format("mooncake")->load(setting.traces + "/mooncake_" + name + ".jsonl", TraceOptions{});
  if (!trace) return trace.error();
  std::vector<double> prompts, outputs, uses;
  std::unordered_map<uint64_t, int> used;
  for (const TraceRequest& r : trace.value().requests) {
    prompts.push_back(r.prompt_tokens), outputs.push_back(r.output_tokens);
    for (uint64_t block : r.blocks) ++used[block];
  }
  for (const auto& [block, n] : used) uses.push_back(n);
  Finding found;
  for (auto [what, of] : {std::pair("prompt", &prompts), {"output", &outputs}, {"uses", &uses}}) {
    std::ranges::sort(*of);
    double sum = 0;
    for (double x : *of) sum += x;
    Values row = {{"what", what}, {"n", of->size()}, {"mean", sum / double(of->size())}, {"max", of->back()}};
    row["ones"] = double(std::ranges::upper_bound(*of, 1) - of->begin()) / double(of->size());
    for (double p : {10., 25., 50., 75., 90., 99.}) row["p" + std::to_string(int(p))] = percentile_seen(*of, p);
    found.rows.push_back(row);
  }
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}
REGISTER_EXPERIMENT("mooncake_traces", "cpu", points, open);
}  // namespace traces

// P's KV goes to D's memory by request or by layer; beside it the same prompt whose KV is there at once.
namespace store {

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int prompt = 8192; prompt <= (setting.tiny ? 8192 : 1 << 17); prompt *= 2)
    for (double gb_per_s : {49., 128.})
      for (const char* grain : {"request", "layer"})
        all.push_back({{"prompt", prompt}, {"gb_per_s", gb_per_s}, {"grain", grain}});
  return all;
}

Result<Finding> run(const Values& point) {
  Trace trace{.block_tokens = 512};
  add_request(trace, 0, point["prompt"], 4);
  SimulationOptions options = a800("1P1D", trace);
  options.conductor.placement = find_placement_policy("least_loaded");
  options.conductor.stream_kv = point["grain"] == "layer" ? StreamKv::layer : StreamKv::request;
  set_step_tokens(options, point["prompt"]);
  options.hardware.link_s = 0;
  Finding found;
  const auto gap_s = [&](double bytes_per_s) {
    options.hardware.link_bytes_per_s = bytes_per_s;
    const Result<Simulation> run = simulate(options, trace);
    found.wrong = run ? unserved(run.value(), trace) : run.error().message;
    return found.wrong.empty() ? double(run.value().records[0].times.gaps[0]) : 0;
  };
  const double without = gap_s(kNoWire);
  if (!found.wrong.empty()) return found;
  const double gb_per_s = point["gb_per_s"], tokens = point["prompt"];
  const double store_s = gap_s(1e9 * gb_per_s) - without;
  found.rows.push_back({{"kv_gb", 1e-9 * tokens * options.model.kv_token_bytes()}, {"store_s", store_s}});
  return found;
}

Measure open(const Setting&) { return run; }
REGISTER_EXPERIMENT("mooncake_store", "cpu", points, open);
}  // namespace store

}  // namespace
}  // namespace xpyd::experiments::mooncake_arxiv_experiment
