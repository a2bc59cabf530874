// reservation: what is it worth that a prompt begins only when its prefix is pinned and its suffix's room and D's are
// held (--reservation escrow), beside one that begins as soon as P has room?
//
// `overload` is the set-up of `rejection` (12P1D of 8 x A800, Llama-3-70B, four links of 200 Gb/s, Mooncake's
// conversation trace, three parts of 5,000 requests), twice as fast as recorded, so that D is short of room, and once;
// clients wait for ever, or leave 60 s after they came, with what they have. `late` refuses, when its prompt is done,
// who would find D full; `reserve` when he comes. In vain are prompts whose clients got nothing but the first token,
// unfinished those whose clients left before the last one, wasted those that were refused when they were done.
//
// `reuse` is WavePP's ablation in its shape: eight clients in a closed loop, each with a prompt of 131,072 tokens of
// which nine tenths are those of its own before, one prefill instance of eight stages, chunks of 16,384 tokens, windows
// of 16; one H200 a stage with Llama-3-70B (Kimi K3 and B300 are in no table), links of 1.6 Tb/s. P and D each hold
// 0.7, 0.9 or 1.1 of the eight prompts; answers have 2 to 17 tokens.
//
// Arithmetic. Overload: D takes 6.4 requests/s of 6.8 (rejection), in bursts of 10 and more. Without reservations P
// computes what comes, gives the first token and holds the KV: who waits there for D waits between two tokens, and a
// mean of the longest tenth of 17 gaps with one of 2 s in it is beyond 100 ms; with them it waits before the first one,
// where 30 s are allowed. So within both objectives are .3 of them without and .6 with, times 1.2 to 4. Until the first
// token it is longer: 1 to 30 times in the mean. P's memory (1.33 M tokens, 110 prompts) is what bounds those who wait
// with KV, then P stops, too: throughput is D's in both: .95 to 1.05. Of clients that leave after 60 s those wait in
// vain who come while 60 s of work lie before D: in vain 0 to 20 % of what P computes without, 0 with, but for who
// leaves in the half second of computing: below 1 %. `late` refuses at the prompt's end: 10 to 45 % are in vain
// (rejection); with a promise of room D's load is what it was when it was promised, so few are refused: a half to none
// of that. At the recorded speed D has room: 1 to 1.02 times.
// Reuse: a prompt's prefix is in one block table for all stages here, and the engine takes what it finds when it
// begins: what WavePP's leases mend, stages whose caches lose different blocks, cannot be. What is left: a prefix that
// is found when its prompt comes, and is evicted while it waits. With room for less than all eight an LRU in turn loses
// each before it comes again: hits of 0 to .9; pinned ones stay, and the others find nothing. Between 1 and 1.6 times
// the tokens/s at .7 and .9; at 1.1 nothing is lost: .98 to 1.02.
#include <algorithm>

#include "experiments/simulated.h"

namespace xpyd::experiments::reservation_experiment {
namespace {

using namespace disagg;

constexpr Objectives kObjectives = {30, 0.1};
constexpr int kDraws = 3;
constexpr int kClients = 8, kTurns = 6, kPrompt = 131072, kBlock = 512;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  const auto add = [&](const char* part, double speed, const char* admission, double deadline_s, double pool,
                       int draw) {
    for (const char* reservation : {"off", "escrow"})
      all.push_back({{"part", part},
                     {"speed", speed},
                     {"admission", admission},
                     {"deadline_s", deadline_s},
                     {"pool", pool},
                     {"reservation", reservation},
                     {"sample", draw}});
  };
  for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw) {
    for (double speed : {1., 2.}) add("overload", speed, "none", 0, 0, draw);
    add("overload", 2, "none", 60, 0, draw);
    for (const char* admission : {"late", "reserve"}) add("overload", 2, admission, 0, 0, draw);
    for (double pool : {0.7, 0.9, 1.1}) add("reuse", 1, "none", 0, pool, draw);
  }
  return all;
}

// Each client's prompts have nine tenths in common; their order is drawn for each round.
Trace reuse_trace(const Setting& setting, uint64_t seed) {
  Trace trace{.requests = {}, .block_tokens = kBlock, .closed_loop = true, .notes = {}};
  const int prompt = setting.tiny ? 8 * kBlock : kPrompt, turns = setting.tiny ? 2 : kTurns;
  Random random(seed);
  for (int turn = 0; turn < turns; ++turn)
    for (int client = 0; client < kClients; ++client) {
      TraceRequest request{.arrival_s = turn == 0 ? 1e-3 * random.uniform() : 0,
                           .prompt_tokens = prompt,
                           .output_tokens = 2 + int(random.below(16)),
                           .session = client,
                           .after = turn == 0 ? -1 : int(trace.requests.size()) - kClients};
      for (int block = 0; block < prompt / kBlock; ++block) {
        const bool common = block < prompt / kBlock * 9 / 10;
        request.blocks.push_back(uint64_t(client + 1) << 40 | uint64_t(common ? 0 : turn + 1) << 24 | uint64_t(block));
      }
      trace.requests.push_back(std::move(request));
    }
  return trace;
}

Result<Trace> trace_of(const Values& point, const Setting& setting) {
  const int draw = point["sample"];
  if (point["part"] == "reuse") return reuse_trace(setting, setting.seed + uint64_t(draw));
  TraceOptions reading{.jitter_s = 3, .seed = setting.seed + uint64_t(draw)};
  Result<Trace> trace = find_trace_format("mooncake")->load(setting.traces + "/mooncake_conversation.jsonl", reading);
  if (!trace) return trace;
  const size_t all = trace.value().requests.size(), n = setting.tiny ? 80 : 5000;
  return faster(window(trace.value(), (all - n) / (kDraws - 1) * size_t(draw), n), point["speed"]);
}

Result<SimulationOptions> options_of(const Values& point, const Trace& trace) {
  if (point["part"] == "overload") {
    Result<SimulationOptions> options = simulated("a800x8", "llama-3-70b", "12P1D", trace);
    if (!options) return options;
    options.value().hardware.link_bytes_per_s = 100e9;
    options.value().conductor.placement = find_placement_policy("mooncake");
    return options;
  }
  Result<SimulationOptions> options = simulated("h200x1", "llama-3-70b", "1P1D", trace);
  if (!options) return options;
  SimulationOptions& o = options.value();
  o.prefill_pp = o.decode_pp = 8;
  o.hardware.link_bytes_per_s = 200e9;
  o.kv_tokens = double(point["pool"]) * kClients * trace.requests[0].prompt_tokens;
  o.conductor.placement = find_placement_policy("least_loaded");
  set_step_tokens(o, 16384);
  return options;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const Result<Trace> trace = trace_of(point, setting);
  if (!trace) return trace.error();
  Result<SimulationOptions> options = options_of(point, trace.value());
  if (!options) return options.error();
  SimulationOptions& o = options.value();
  o.conductor.objectives = kObjectives;
  o.conductor.admission = find_admission_policy(std::string(point["admission"]));
  o.conductor.escrow = point["reservation"] == "escrow";
  o.deadline_s = point["deadline_s"];
  const Result<Simulation> run = simulate(o, trace.value());
  if (!run) return run.error();
  Finding found;
  std::string wrong;
  Values row = outcome(run.value(), kObjectives, wrong);
  if (o.deadline_s == 0) found.wrong = wrong;
  double computed = 0, in_vain = 0, unfinished = 0, tokens = 0, last_s = 0;
  for (const SimulatedRecord& r : run.value().records) {
    last_s = std::max(last_s, r.last_s);
    if (r.end == SimulatedEnd::completed) tokens += r.prompt + double(r.times.gaps.size()) + 1;
    if (r.times.first_s < 0) continue;  // P gives the first token
    computed += r.prompt - r.cached;
    if (r.end == SimulatedEnd::completed) continue;
    unfinished += r.prompt - r.cached;
    if (r.times.gaps.empty()) in_vain += r.prompt - r.cached;
  }
  row["in_vain_share"] = in_vain / std::max(1.0, computed);
  row["unfinished_share"] = unfinished / std::max(1.0, computed);
  row["wasted_share"] = double(row["wasted_prefill_s"]) / double(row["prefill_busy_s"]);  // by refusals
  row["tokens_s"] = tokens / std::max(1e-9, last_s);
  row["evictions"] = run.value().prefill_evictions;
  found.rows.push_back(row);
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("reservation", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::reservation_experiment
