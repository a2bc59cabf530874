// cpp_tail: how long after a prompt's last chunk has left the last stage does the last byte of its KV arrive at the
// decode instance, by what is sent at a time, the rate of the wire, the chunks and the window?
//
// Llama-3-70B in P = 8 stages of ten layers, one H200 each, costs as in cpp_surface. A prompt of 131,072 tokens has
// 327,680 B a token, of which a stage sends an eighth, 41 KB. Each stage has a NIC of its own, which sends in order and
// while the stage computes; the decode instance takes in as fast. 20 us of latency. What crosses between stages (16 KiB
// a token) has another way. Grain: `layer`, of a chunk, as soon as the stage has computed it; `chunk`, a stage's ten
// layers when the chunk leaves it; `prompt`, all when the last chunk leaves the last stage.
//
// Arithmetic. A stage makes 41 KB in 41 us (cold) to 139 us (at 131,072): 8 to 2.4 Gb/s. A wire that is faster never
// has more than a chunk to send, and the last piece alone is exposed, x_M 41 KB / rate: chunks of 8,192 6.7 ms at 400
// Gb/s, 27 at 100, 107 at 25, 268 at 10, always 1 / 16 of a whole prompt's 107 ms to 4.3 s; a layer of it a tenth, and
// 20 us. Equal-time chunks end with about 800 tokens: 8 to 18 times less, .7 ms at 400 Gb/s, and then latency counts:
// layer / chunk is .12 to .16. TTFT is 12 + 7 * 1.1 = 20 s in chunks of 8,192 and 13.2 in equal-time ones, so at 400
// Gb/s even whole prompts expose 1 %; chunk x layer matters from 25 Gb/s down.
//
// At 2.5 Gb/s (a NIC that others use) the wire needs 131 us a token, 17.2 s a prompt. Equal-time: the last stage begins
// at .7 s and ends at 13.2: 4 to 6 s exposed even by layers; prompt / layer 2.5 to 4.5. Chunks of 8,192: the last
// stage begins at 2.5 s and late chunks take it 1.1 s where the wire takes 1.07, so nothing is left behind: a layer of
// the last one, 107 ms. (The first range, .2 to 1.2 s, took all 17.2 s from 2.9 on to be in one piece.)
//
// The window: nothing for one prompt, nor for a wire that keeps up. Of eight queued at 2.5 Gb/s, in chunks of 8,192, a
// prompt takes 12 s without a window and 16 with W = P (cpp_surface), the wire 17.2: the last tail is 8 * 17.2 + 2.9 -
// (8 * 12 + 7.7) = 37 s against 8.5: 3 to 7 times as much.
#include <algorithm>

#include "experiments/cpp_chunks.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments::cpp_tail_experiment {
namespace {

constexpr int kStages = 8;
constexpr double kTokens = 131072, kLatency = 20e-6;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* chunks : {"8K", "2K", "equal time"})
    for (const char* window : {"P", "2P", "none"})
      for (int queued : setting.tiny ? std::vector<int>{1} : std::vector<int>{1, 8})
        all.push_back({{"chunks", chunks}, {"window", window}, {"queued", queued}});
  return all;
}

// A stage's NIC: pieces in the order in which they are ready.
class Wire {
 public:
  explicit Wire(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  void send(double ready, double bytes) { free_ = std::max(free_, ready) + bytes / bytes_per_s_; }
  double arrived() const { return free_ + kLatency; }  // the last piece

 private:
  double bytes_per_s_, free_ = 0;
};

// For each prompt: seconds from its last chunk's end on the last stage to its last byte.
std::vector<double> tails(const model::PipelineTimes& times, const std::vector<Chunk>& chunks, int queued,
                          int stage_layers, double token_bytes, const std::string& grain, double bytes_per_s) {
  std::vector<Wire> wires(kStages, Wire(bytes_per_s));
  std::vector<double> all;
  const int M = int(chunks.size());
  for (int prompt = 0; prompt < queued; ++prompt) {
    const int last = (prompt + 1) * M - 1;
    const double end = times.left(last, kStages - 1);
    double arrived = 0;
    for (int s = 0; s < kStages; ++s) {
      Wire& wire = wires[size_t(s)];
      for (int i = prompt * M; i <= last; ++i) {
        const double begun = times.begun(i, s), left = times.left(i, s), bytes = chunks[size_t(i % M)].x * token_bytes;
        if (grain == "layer")
          for (int layer = 1; layer <= stage_layers; ++layer)
            wire.send(begun + (left - begun) * layer / stage_layers, bytes / stage_layers);
        else
          wire.send(grain == "chunk" ? left : end, bytes);
      }
      arrived = std::max(arrived, wire.arrived());
    }
    all.push_back(arrived - end);
  }
  return all;
}

Result<Finding> run(const Values& point) {
  Result<disagg::SimulatedModel> model = disagg::find_simulated_model("llama-3-70b");
  Result<disagg::Hardware> card = disagg::find_hardware("h200x1");
  if (!model) return model.error();
  if (!card) return card.error();
  const disagg::SimulatedModel& m = model.value();
  const disagg::Hardware& h = card.value();
  const auto terms = disagg::step_cost(m, h).terms();
  const ChunkCost cost{h.step_s, terms[0] - h.step_s, terms[1], terms[2], terms[3]};
  const std::string name = point["chunks"], window = point["window"];
  const int queued = point["queued"];
  const std::vector<Chunk> chunks = name == "equal time" ? best_equal_time(cost, 0, kTokens, kStages)
                                                         : cut(0, kTokens, fixed_chunks(name == "8K" ? 8192 : 2048));
  const double boundary_token_s = m.n_heads * m.head_dim * 2 / h.link_bytes_per_s;
  const model::PipelineTimes times = model::pipeline_times(
      stream(cost, chunks, kStages, queued, boundary_token_s, h.link_s), window == "P"    ? kStages
                                                                         : window == "2P" ? 2 * kStages
                                                                                          : 0);
  Finding found;
  for (const char* grain : {"layer", "chunk", "prompt"})
    for (double gbps : {400., 100., 25., 10., 2.5}) {
      const std::vector<double> all = tails(times, chunks, queued, m.n_layers / kStages, m.kv_token_bytes() / kStages,
                                            grain, gbps * 1e9 / 8);
      double mean = 0;
      for (double tail : all) mean += tail / double(all.size());
      found.rows.push_back({{"grain", grain},
                            {"gbps", gbps},
                            {"n_chunks", int(chunks.size())},
                            {"last_chunk", chunks.back().x},
                            {"ttft_s", times.left(int(chunks.size()) - 1, kStages - 1)},
                            {"tail_ms", 1e3 * mean},
                            {"last_tail_ms", 1e3 * all.back()}});
    }
  return found;
}

REGISTER_EXPERIMENT("cpp_tail", "cpu", points, [](const Setting&) -> Measure { return run; });

}  // namespace
}  // namespace xpyd::experiments::cpp_tail_experiment
