// transfer_exposed: How much of a KV transfer does the second token wait for, by the grain of the transfer and the link
//   rate?
// Paper: Splitwise (ISCA'24) section 4.2; Mooncake (arXiv 2407.00079 v4) section 5.2.
// Set-up: 1P1D, a prompt of 4,096 tokens of Llama-3.1-8B in one step or in four of 1,024, by the grain (--stream-kv,
//   --kv-transfer) and the rate of the link. `exposed_ms` is the gap before the second token, less the same gap with a
//   transfer that takes no time. The unit of `exposed_layers` is the time of one layer's KV of the last step on the
//   link. `behind`: P computes another prompt right after it.
// Command: make exp-transfer_exposed (seconds; virtual, computed).
// Expected: 124 ms of computing, 3.9 ms a layer. A layer's KV is 16.8 MB, 1.34 ms at 100 Gb/s. By layer the last layer
//   remains, less the 50 us of P's message to D: .963 at 100 Gb/s, .851 at 400. By request all 32 layers of a fourth:
//   43 ms.
// Found: .96 and .85 of a layer's time are exposed; by request it is 33 times as much.
#include <algorithm>

#include "experiments/cpp_chunks.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::transfer_exposed_experiment {
namespace {

using namespace disagg;

// Seconds between the first request's token that P samples and its second token.
double first_gap_s(SimulationOptions options, const Trace& trace, double link_bytes_per_s, std::string& wrong) {
  options.hardware.link_bytes_per_s = link_bytes_per_s;
  const Result<Simulation> run = simulate(options, trace);
  wrong = run ? unserved(run.value(), trace) : run.error().message;
  return wrong.empty() ? double(run.value().records[0].times.gaps[0]) : 0;
}

namespace grain {

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
  // Without `behind`: no transfer takes time, and P is idle.
  const double without = first_gap_s(options, trace, kNoTransferTime, found.wrong);
  if (!found.wrong.empty()) return found;
  const double bytes_per_s = double(point["gbps"]) * 1e9 / 8;
  if (point["behind"] == "yes") add_request(trace, 1e-3, prompt, 4);
  const double gap = first_gap_s(options, trace, bytes_per_s, found.wrong);
  const int last = std::min(int(point["step"]) / divide, prompt);
  const double layer_s = options.model.kv_token_bytes() / options.model.n_layers * last / bytes_per_s;
  found.rows.push_back({{"first_gap_ms", 1e3 * gap},
                        {"no_wire_gap_ms", 1e3 * without},
                        {"exposed_ms", 1e3 * (gap - without)},
                        {"layer_ms", 1e3 * layer_s},
                        {"exposed_layers", (gap - without) / layer_s}});
  return found;
}

REGISTER_EXPERIMENT("transfer_exposed", "cpu", points, each<run>);

}  // namespace grain

// transfer_exposed/cpp_tail: the same for a prompt of 131,072 tokens of Llama-3-70B in eight stages with a NIC each, by
// the unit that is sent: a layer of a chunk, a chunk of a stage, or the prompt.
//
// Expected: a stage makes 41 KB of KV in 41 to 139 us, so a link above 8 Gb/s never has more than a chunk to send.
// 8,192 tokens take 6.7 ms at 400 Gb/s, 1 / 16 of the prompt's time, and a layer a tenth of it. Equal-time chunks end
// with 800 tokens: 8 to 18 times less.
namespace tail {

constexpr int kStages = 8;
constexpr double kTokens = 131072, kLatency = 20e-6;

std::vector<Values> points(const Setting&) {
  return {{{"chunks", "8K"}}, {{"chunks", "2K"}}, {{"chunks", "equal time"}}};
}

// A stage's NIC sends pieces in the order in which they are ready.
class MeasuredTransport {
 public:
  explicit MeasuredTransport(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  void send(double ready, double bytes) { free_ = std::max(free_, ready) + bytes / bytes_per_s_; }
  double arrived() const { return free_ + kLatency; }  // when the last piece arrives

 private:
  double bytes_per_s_, free_ = 0;
};

// Seconds from the end of the prompt's last chunk on the last stage until its last byte arrives.
double tail_s(const PipelineTimes& times, const std::vector<Chunk>& chunks, int stage_layers, double token_bytes,
              const std::string& grain, double bytes_per_s) {
  const int last = int(chunks.size()) - 1;
  const double end = times.left(last, kStages - 1);
  double arrived = 0;
  for (int s = 0; s < kStages; ++s) {
    MeasuredTransport transport(bytes_per_s);
    for (int i = 0; i <= last; ++i) {
      const double begun = times.begun(i, s), left = times.left(i, s), bytes = chunks[size_t(i)].x * token_bytes;
      if (grain == "layer")
        for (int layer = 1; layer <= stage_layers; ++layer)
          transport.send(begun + (left - begun) * layer / stage_layers, bytes / stage_layers);
      else
        transport.send(grain == "chunk" ? left : end, bytes);
    }
    arrived = std::max(arrived, transport.arrived());
  }
  return arrived - end;
}

Result<Finding> run(const Values& point) {
  const disagg::SimulatedModel m = disagg::find_simulated_model("llama-3-70b").value();
  const disagg::Hardware h = disagg::find_hardware("h200x1").value();
  const ChunkCost cost = chunk_cost(m, h);
  const std::string name = point["chunks"];
  const std::vector<Chunk> chunks = name == "equal time" ? best_equal_time(cost, 0, kTokens, kStages)
                                                         : cut(0, kTokens, fixed_chunks(name == "8K" ? 8192 : 2048));
  const double boundary_token_s = m.n_heads * m.head_dim * 2 / h.link_bytes_per_s;
  const PipelineTimes times = pipeline_times(stream(cost, chunks, kStages, 1, boundary_token_s, h.link_s), 0);
  Finding found;
  for (const char* grain : {"layer", "chunk", "prompt"})
    for (double gbps : {400., 100., 25., 10., 2.5}) {
      const double tail = tail_s(times, chunks, m.n_layers / kStages, m.kv_token_bytes() / kStages, grain,
                                 gbps * 1e9 / 8);
      found.rows.push_back({{"grain", grain},
                            {"gbps", gbps},
                            {"n_chunks", int(chunks.size())},
                            {"last_chunk", chunks.back().x},
                            {"ttft_s", times.left(int(chunks.size()) - 1, kStages - 1)},
                            {"tail_ms", 1e3 * tail}});
    }
  return found;
}

REGISTER_EXPERIMENT("transfer_exposed/cpp_tail", "cpu", points, [](const Setting&) -> Measure { return run; });

}  // namespace tail

}  // namespace
}  // namespace xpyd::experiments::transfer_exposed_experiment
