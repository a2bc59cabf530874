// cpp_surface: time to first token and throughput of a pipeline of P cards against tensor parallelism over the same P,
// by length, reused prefix, prompts queued, chunks and window. cpp_crossover: where one passes the other.
//
// Costs are published figures (experiments/simulate/hardware.cc): Llama-3-70B in bf16 on H200, .44 of 989 TFLOP/s, .7
// of 4.8 TB/s, 0.5 ms of launches a step. One card per stage; a step of a stage costs its launches and 1 / P of
// everything else. (70B on P = 2 leave no room for 512K of KV: times, not a deployment.) A boundary carries 16 KiB a
// token at 50 GB/s, and 20 us.
//
// What TP is taken to be: every step costs its launches, 1 / P of everything else at the same share of peak, and in
// each of the 80 layers two ring all-reduces of [tokens, 8192] in bf16, 2 (P - 1) / P of which each card sends, in 2 (P
// - 1) hops; nothing overlaps them. `nvlink`: 450 GB/s each way and 1 us a hop; `nic`: 50 GB/s and 5 us. Steps of at
// most 8,192 tokens. Requests one after another, as in the pipeline. Mixtures of experts, which have all-to-alls and
// imbalance besides, are not in it.
//
// Arithmetic. A token costs 324 us of one card, behind L another 6.0 ns L: 40.6 us at P = 8, and 49 in the mean of a
// cold 128K. TP's all-reduces are 4 * 7 / 8 * 8192 * 80 * 2 = 4.59 MB a token: 10.2 us over NVLink, 92 us over NICs: TP
// is slower than its products by o = .25 (cold and short) to .11 (128K), and by 2.3 to 1.0.
//
// Queued. M equal chunks have M / (M + P - 1) of the pipeline, so CPP overtakes at M = (P - 1) / o. o is (P - 1) k
// where bandwidth counts: M = 1 / k, whatever P. Prompts of 8,192, P = 8: .363 s on a stage, all-reduces .086 s over
// NVLink: o = .236, 30 chunks (26 to 33); P = 2: 1.45 and .048: 31. Over NICs .763: 3.3, so 4; P = 2 .43 / 1.45: 4.
// "From P chunks queued" is true where o = (P - 1) / P: TP at half its speed, as WavePP's baseline is, and not of a
// dense model over NVLink. 32 cold prompts of 128K: CPP is ahead by TP's 11 %, less 2: 1.05 to 1.12.
//
// One cold prompt. In equal-time chunks U + 2 sqrt((P - 1) U c) + (P - 1) c, c = 5.75 ms (launches, and reading
// weights) and 12 ns L. 128K, P = 8: U = 11.7 s, 112 chunks, 1.5 s more; TP over NVLink 1.37 and .09: equal, .97
// to 1.06. Both grow with the length once attention is most of it (5.6 and 5.4 s at 512K), so there is no sharp
// crossover: somewhere from 64K on, or nowhere. Chunks of 8,192: 7 of the last, 2.3 s + 43 us a token, more than
// TP's 10.2 us a token for any length: never. 2 K tokens, P = 8: .24 s against .11. Over NICs 92 us a token: chunks of
// 8,192 from 2.3 / 49 us = 47K (35K to 70K), equal-time ones from 1.2K (.7K to 2.5K); P = 2 from 5K (3K to 10K).
//
// Behind 90 % of 128K: 13,107 tokens, U = 1.75 s, .55 s more: 31 % against TP's 8: CPP is 1.1 to 1.35 times as long; in
// two chunks, 8,192 and 4,915: 1.75 + 7 * 1.1 = 9.4 s against 1.9: 4 to 5.5 times, over NICs (2.96 s) 2.5 to 3.8.
//
// Window, 32 prompts of 128K in chunks of 8,192, .36 to 1.1 s: with W = P the eighth chunk of a prompt waits for the
// last of the one before to leave: 7 (1.1 - .5) s of 12: without a window the rate is 1.2 to 1.45 times, and 2P gives
// it back. For one prompt the window is nothing (its chunks grow: cpp_window), and little for equal-time ones (1
// to 1.08).
#include <cmath>

#include "experiments/cpp_chunks.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments::cpp_surface_experiment {
namespace {

constexpr double kHidden = 8192, kElement = 2, kLayers = 80, kStep = 8192;

struct Machine {
  ChunkCost cost;      // of one card
  double link_s = 0;   // of a boundary
  double token_s = 0;  // of a boundary, a token
};

Result<Machine> machine() {
  Result<disagg::SimulatedModel> model = disagg::find_simulated_model("llama-3-70b");
  Result<disagg::Hardware> card = disagg::find_hardware("h200x1");
  if (!model) return model.error();
  if (!card) return card.error();
  const disagg::Hardware& h = card.value();
  const auto terms = disagg::step_cost(model.value(), h).terms();
  return Machine{
      {h.step_s, terms[0] - h.step_s, terms[1], terms[2], terms[3]}, h.link_s, kHidden * kElement / h.link_bytes_per_s};
}

struct Link {
  const char* name;
  double bytes_per_s, hop_s;
};
constexpr Link kLinks[] = {{"nvlink", 450e9, 1e-6}, {"nic", 50e9, 5e-6}};

// One prompt by tensor parallelism over `cards`.
double tp_seconds(const ChunkCost& cost, double cached, double tokens, int cards, const Link& link) {
  double sum = 0;
  for (const Chunk& step : cut(cached, tokens, fixed_chunks(kStep))) {
    const double hops = 2.0 * (cards - 1), sent = hops / cards * step.x * kHidden * kElement;
    sum += cost.seconds(step.L, step.x, cards) + 2 * kLayers * (sent / link.bytes_per_s + hops * link.hop_s);
  }
  return sum;
}

std::vector<Chunk> chunks_of(const std::string& name, const ChunkCost& cost, double cached, double tokens, int stages) {
  return name == "equal time" ? best_equal_time(cost, cached, tokens, stages)
                              : cut(cached, tokens, fixed_chunks(name == "2K" ? 2048 : kStep));
}

model::PipelineTimes cpp(const Machine& m, const std::vector<Chunk>& chunks, int stages, int queued, int window) {
  return model::pipeline_times(stream(m.cost, chunks, stages, queued, m.token_s, m.link_s), window);
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int stages : {2, 4, 8})
    for (int tokens : {2048, 8192, 32768, 131072, 524288})
      for (double reused : {0., .5, .9})
        for (int queued : {1, 8, 32})
          if (!setting.tiny || tokens < 32768)
            all.push_back({{"stages", stages}, {"tokens", tokens}, {"reused", reused}, {"queued", queued}});
  return all;
}

Result<Finding> run(const Values& point) {
  const Result<Machine> found = machine();
  if (!found) return found.error();
  const Machine& m = found.value();
  const int stages = point["stages"], queued = point["queued"];
  const double tokens = point["tokens"],
               cached = std::floor(tokens * double(point["reused"]) / kChunkPage) * kChunkPage;
  double tp[2];
  for (size_t i = 0; i < 2; ++i) tp[i] = tp_seconds(m.cost, cached, tokens - cached, stages, kLinks[i]);
  Finding result;
  for (const char* name : {"2K", "8K", "equal time"}) {
    const std::vector<Chunk> chunks = chunks_of(name, m.cost, cached, tokens - cached, stages);
    for (const char* window : {"P", "2P", "none"}) {
      const int in_flight = std::string(window) == "P" ? stages : std::string(window) == "2P" ? 2 * stages : 0;
      const model::PipelineTimes times = cpp(m, chunks, stages, queued, in_flight);
      double ttft = 0;  // mean: all came at 0
      for (int i = 1; i <= queued; ++i) ttft += times.left(i * int(chunks.size()) - 1, stages - 1) / queued;
      const double tp_queue = (queued + 1) / 2.0;
      result.rows.push_back({{"chunks", name},
                             {"window", window},
                             {"n_chunks", int(chunks.size())},
                             {"ttft_s", ttft},
                             {"tokens_per_s", queued * (tokens - cached) / times.end()},
                             {"nvlink_ttft", ttft / (tp[0] * tp_queue)},
                             {"nvlink_rate", queued * tp[0] / times.end()},
                             {"nic_ttft", ttft / (tp[1] * tp_queue)},
                             {"nic_rate", queued * tp[1] / times.end()}});
    }
  }
  return result;
}

REGISTER_EXPERIMENT("cpp_surface", "cpu", points, [](const Setting&) -> Measure { return run; });

// ---- cpp_crossover.

std::vector<Values> crossover_points(const Setting&) {
  std::vector<Values> all;
  for (int stages : {2, 4, 8})
    for (const Link& link : kLinks)
      for (const char* chunks : {"8K", "equal time"})
        all.push_back({{"stages", stages}, {"link", link.name}, {"chunks", chunks}});
  return all;
}

// The least length at which one cold prompt has its first token no later by CPP (kMost: none), and how many prompts of
// one chunk, 8,192 tokens, must be queued for as high a throughput. No window.
Result<Finding> crossover(const Values& point) {
  const Result<Machine> found = machine();
  if (!found) return found.error();
  const Machine& m = found.value();
  const int stages = point["stages"];
  const std::string chunks = point["chunks"];
  const Link& link = point["link"] == "nvlink" ? kLinks[0] : kLinks[1];
  constexpr double kMost = 1 << 22;
  double length = kMost;
  for (double at = 256; at < kMost && length == kMost; at *= std::pow(2, .125)) {
    const double tokens = std::floor(at / kChunkPage) * kChunkPage;
    const double ours = cpp(m, chunks_of(chunks, m.cost, 0, tokens, stages), stages, 1, 0).end();
    if (ours <= tp_seconds(m.cost, 0, tokens, stages, link)) length = tokens;
  }
  const std::vector<Chunk> one = cut(0, kStep, fixed_chunks(kStep));
  int queued = 1;
  while (queued < 1000 && cpp(m, one, stages, queued, 0).end() > queued * tp_seconds(m.cost, 0, kStep, stages, link))
    ++queued;
  return Finding{{{{"length", length}, {"queued_chunks", queued}}}, ""};
}

REGISTER_EXPERIMENT("cpp_crossover", "cpu", crossover_points, [](const Setting&) -> Measure { return crossover; });

}  // namespace
}  // namespace xpyd::experiments::cpp_surface_experiment
