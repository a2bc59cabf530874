// cpp_vs_tp: When does a pipeline of P GPUs beat tensor parallelism over the same P, by length, reused prefix, queued
//   prompts, chunks and window?
// Paper: Mooncake (FAST'25) section 3.3, which has no figure; WavePP (2026-09) Table 4.
// Set-up: first token and throughput, by length, reused prefix, queued prompts, chunks and window. /crossover: where
//   one becomes faster than the other. Llama-3-70B on H200 by the card's figures (experiments/simulate/hardware.cc). A
//   boundary carries 16 KiB a token at 50 GB/s and 20 us. TP has two exposed ring all-reduces a layer over NVLink (450
//   GB/s, 1 us a hop) or NICs (50 GB/s, 5 us).
// Command: make exp-cpp_vs_tp (seconds; computed).
// Expected: a token costs 40.6 us at P = 8, and 49 us in the mean of 128K tokens. TP sends 4.59 MB of it: 10.2 us over
//   NVLink, 92 us over NICs. So TP is slower by o = .25 to .11, and by 2.3 to 1.0. With a queue, CPP overtakes at M =
//   (P - 1) / o chunks: 30 and 4. One cold prompt of 128K in equal-time chunks takes U = 11.7 s plus 1.5 s: equal to TP
//   over NVLink; in chunks of 8,192 it never is. With 90 % cached it takes 1.1 to 1.35 times as long, in two chunks 4
//   to 5.5. Windows: 32 prompts in chunks of 8,192 lose 1.2 to 1.45 with W = P.
// Found: with 90 % of 131K reused PP8 has .37 of TP8's tokens/s, as WavePP prints. Its cold PP8 is below TP8; here it
//   is 2 to 15 % above.
#include <algorithm>
#include <cmath>

#include "experiments/cpp_chunks.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments::cpp_vs_tp_experiment {
namespace {

namespace surface {

constexpr double kHidden = 8192, kElement = 2, kLayers = 80, kStep = 8192;

struct Machine {
  ChunkCost cost;      // of one card
  double link_s = 0;   // of a boundary
  double token_s = 0;  // of a boundary, per token
};

Machine machine() {
  const disagg::Hardware h = disagg::find_hardware("h200x1").value();
  return {chunk_cost(disagg::find_simulated_model("llama-3-70b").value(), h), h.link_s,
          kHidden * kElement / h.link_bytes_per_s};
}

struct Link {
  const char* name;
  double bytes_per_s, hop_s;
};
constexpr Link kLinks[] = {{"nvlink", 450e9, 1e-6}, {"nic", 50e9, 5e-6}};

// Seconds of one prompt with tensor parallelism over `cards`.
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

PipelineTimes cpp(const Machine& m, const std::vector<Chunk>& chunks, int stages, int queued, int window) {
  return pipeline_times(stream(m.cost, chunks, stages, queued, m.token_s, m.link_s), window);
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
  const Machine m = machine();
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
      const PipelineTimes times = cpp(m, chunks, stages, queued, in_flight);
      double ttft = 0;  // the mean; all prompts came at 0
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

REGISTER_EXPERIMENT("cpp_vs_tp", "cpu", points, [](const Setting&) -> Measure { return run; });

std::vector<Values> crossover_points(const Setting&) {
  std::vector<Values> all;
  for (int stages : {2, 4, 8})
    for (const Link& link : kLinks)
      for (const char* chunks : {"8K", "equal time"})
        all.push_back({{"stages", stages}, {"link", link.name}, {"chunks", chunks}});
  return all;
}

// Finds the least length at which one cold prompt has its first token no later with CPP (kMost: none), and the number
// of queued prompts of one chunk, 8,192 tokens, from which throughput is as high. No window.
Result<Finding> crossover(const Values& point) {
  const Machine m = machine();
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

REGISTER_EXPERIMENT("cpp_vs_tp/crossover", "cpu", crossover_points,
                    [](const Setting&) -> Measure { return crossover; });

}  // namespace surface

// cpp_vs_tp/bytes: the bytes that each of G GPUs sends per token, by the way in which the model is divided, and the
// rest of a NIC of 400 Gb/s. TP sends 4 (G - 1) / G H l e, ring 2 (G - 1) / G H_kv l e, Ulysses (G - 1) / G (2 H + 2
// H_kv) l e / G, CPP H e.
//
// Expected (KiB): Llama-3-70B, G = 16: 4,800; 300; 169; 16. Qwen2.5-7B, G = 4: 588; 42; 84; 7. At 49 thousand tokens/s
// TP sends 242 GB/s, 4.8 NICs; CPP leaves 96 % of a NIC beside its KV.
namespace bytes {

struct Shape {
  double G, H, H_kv, layers, e;
};
struct Scheme {
  const char* name;
  double (*bytes)(const Shape&);  // sent by one GPU, per token
};
constexpr Scheme kSchemes[] = {
    {"tp", [](const Shape& s) { return 4 * (s.G - 1) / s.G * s.H * s.layers * s.e; }},
    {"ring", [](const Shape& s) { return 2 * (s.G - 1) / s.G * s.H_kv * s.layers * s.e; }},
    {"ulysses", [](const Shape& s) { return (s.G - 1) / s.G * (2 * s.H + 2 * s.H_kv) * s.layers * s.e / s.G; }},
    {"cpp", [](const Shape& s) { return s.H * s.e; }},
};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const auto& [model, hardware] : {std::pair("llama-3-70b", "h100x16"), {"qwen2.5-7b", "h100x4"}})
    for (const Scheme& scheme : kSchemes)
      all.push_back({{"model", model}, {"hardware", hardware}, {"scheme", scheme.name}});
  return all;
}

Result<Finding> run(const Values& point) {
  const disagg::SimulatedModel m = disagg::find_simulated_model(point["model"]).value();
  const disagg::Hardware hardware = disagg::find_hardware(point["hardware"]).value();
  // The hidden size equals the width of all heads together in these models.
  const Shape shape{double(hardware.cards), double(m.n_heads * m.head_dim), m.kv_elements / 2, double(m.n_layers),
                    m.kv_element_bytes};
  double sent = 0;
  for (const Scheme& scheme : kSchemes)
    if (point["scheme"] == scheme.name) sent = scheme.bytes(shape);
  const double tokens_per_s = 1 / disagg::step_cost(m, hardware).terms()[1];
  const double nic = hardware.link_bytes_per_s, kv = m.kv_token_bytes();
  return Finding{{{{"sent_kb", sent / 1024},
                   {"kv_kb", kv / 1024},
                   {"tokens_per_s", tokens_per_s},
                   {"sent_gbps", 1e-9 * sent * tokens_per_s},
                   {"nic_share", sent * tokens_per_s / nic},
                   {"kv_share", kv / shape.G * tokens_per_s / nic},
                   {"left_share", 1 - (sent + kv / shape.G) * tokens_per_s / nic}}},
                 ""};
}

REGISTER_EXPERIMENT("cpp_vs_tp/bytes", "cpu", points, [](const Setting&) -> Measure { return run; });

}  // namespace bytes

// cpp_vs_tp/bubble: whether the bubble alone explains WavePP's ratios to TP at one request at a time (Kimi K3 on 8 x
// GB300). Chunks of 8,192, all of equal time. TP's overhead o is taken from the figures for 32 requests at once.
//
// Expected: 65.5K: 1 + o = 1.917; M = 8: .533 * 1.917 = 1.02 (.947). 131K: 1.15 (.966). With 90 % of 131K cached, 63 or
// 69 % below TP (63); of 262K, 47 or 54 % (51).
namespace bubble {

constexpr int kStages = 8;
constexpr double kChunk = 8192;

struct Length {
  const char* name;
  double tokens, pp, tp;  // 32 requests at once, tokens/s
  double one_pp, one_tp;  // one at a time; 0: not published
  double below;           // 1 - ratio with 90 % cached, one at a time; 0: not published
};
constexpr Length kLengths[] = {{"65.5K", 65536, 44643, 23925, 22089, 23330, 0},
                               {"131K", 131072, 35878, 22070, 20699, 21430, .63},
                               {"262K", 262144, 28031, 19254, 0, 0, .51}};

// Tokens of each chunk. At one second per token they are also its seconds.
std::vector<double> parts(double tokens, bool equal) {
  const int n = int((tokens + kChunk - 1) / kChunk);
  std::vector<double> sizes(size_t(n), equal ? tokens / n : kChunk);
  if (!equal) sizes.back() = tokens - (n - 1) * kChunk;
  return sizes;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Length& length : kLengths)
    for (double reused : {0., .9})
      for (const char* cut_into : {"8K and the rest", "equal parts"})
        all.push_back({{"length", length.name}, {"reused", reused}, {"cut", cut_into}});
  return all;
}

Result<Finding> run(const Values& point) {
  const std::string name = point["length"];
  const Length& length = *std::ranges::find(kLengths, name, &Length::name);
  const double reused = point["reused"], tokens = (1 - reused) * length.tokens;
  const double many = 32 * length.tokens / kChunk;
  const double tp_over = length.pp / length.tp * (many + kStages - 1) / many;  // 1 + o
  const double ratio = tp_over * tokens / pipeline_seconds(parts(tokens, point["cut"] == "equal parts"), kStages);
  const double published = reused > 0 ? (length.below > 0 ? 1 - length.below : 0)
                                      : (length.one_tp > 0 ? length.one_pp / length.one_tp : 0);
  return Finding{{{{"tp_over", tp_over}, {"ratio", ratio}, {"published", published}}}, ""};
}

REGISTER_EXPERIMENT("cpp_vs_tp/bubble", "cpu", points, [](const Setting&) -> Measure { return run; });

}  // namespace bubble

}  // namespace
}  // namespace xpyd::experiments::cpp_vs_tp_experiment
