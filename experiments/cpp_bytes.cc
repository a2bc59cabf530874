// cpp_bytes: what each GPU sends per token of a prompt, by the way the model is divided; and what that leaves of a NIC
// for the KV that goes to a decode instance anyway.
//
// G GPUs, hidden size H, KV width H_kv (K alone), l layers, e bytes an element:
//   TP       two ring all-reduces a layer, of which each GPU sends 2 (G - 1) / G:   4 (G - 1) / G H l e
//   ring     K and V of its tokens go round to the G - 1 others, 1 / G of them each:  2 (G - 1) / G H_kv l e
//   Ulysses  q and the output, K and V, by all-to-all, of 1 / G of the tokens:        (G - 1) / G (2 H + 2 H_kv) l e /
//   G CPP      the residual stream of each token across each boundary:                  H e KV       2 H_kv l e of the
//   whole model, so 1 / G of it from each GPU
//
// Arithmetic (KB of 1,024). Llama-3-70B, G = 16: 4,800; 300; 169; 16; 320 / 16 = 20. Qwen2.5-7B, G = 4: 588; 42; 84;
// 7; 14. So TP sends 300 and 84 times what CPP does, and one boundary of CPP is 5 and 12.5 % of the model's KV.
//
// At which rate: b = 2 N / (G R), R = .44 of 989 TFLOP/s (H100): 20.3 us a token for the 70B on 16, 8.8 us for the 7B
// on 4: 49 and 114 thousand tokens/s without attention. TP sends 242 and 69 GB/s per GPU: 4.8 and 1.4 times a NIC of
// 400 Gb/s (50 GB/s), so across NICs it cannot keep up; ring 15.1 and 4.9 GB/s: 30 and 10 %; Ulysses 8.5 and 9.8: 17
// and 20 %; CPP 0.8: 1.6 % of both. KV needs 1.0 and 1.6: 2 and 3 %. After CPP 96 % of the NIC are left beside KV,
// after ring 68 and 87 %.
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments::cpp_bytes_experiment {
namespace {

struct Case {
  const char *model, *hardware;  // cards: G
};
constexpr Case kCases[] = {{"llama-3-70b", "h100x16"}, {"qwen2.5-7b", "h100x4"}};

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
  for (const Case& c : kCases)
    for (const Scheme& scheme : kSchemes)
      all.push_back({{"model", c.model}, {"hardware", c.hardware}, {"scheme", scheme.name}});
  return all;
}

Result<Finding> run(const Values& point) {
  Result<disagg::SimulatedModel> model = disagg::find_simulated_model(point["model"]);
  Result<disagg::Hardware> hardware = disagg::find_hardware(point["hardware"]);
  if (!model) return model.error();
  if (!hardware) return hardware.error();
  const disagg::SimulatedModel& m = model.value();
  // Hidden size: these models' heads are as wide together.
  const Shape shape{double(hardware.value().cards), double(m.n_heads * m.head_dim), m.kv_elements / 2,
                    double(m.n_layers), m.kv_element_bytes};
  double sent = 0;
  for (const Scheme& scheme : kSchemes)
    if (point["scheme"] == scheme.name) sent = scheme.bytes(shape);
  const double tokens_per_s = 1 / disagg::step_cost(m, hardware.value()).terms()[1];
  const double nic = hardware.value().link_bytes_per_s, kv = m.kv_token_bytes();
  return Finding{{{{"sent_kb", sent / 1024},
                   {"kv_kb", kv / 1024},
                   {"tokens_per_s", tokens_per_s},
                   {"sent_gbps", 1e-9 * sent * tokens_per_s},
                   {"nic_share", sent * tokens_per_s / nic},
                   {"kv_share", kv / shape.G * tokens_per_s / nic},
                   {"left_share", 1 - (sent + kv / shape.G) * tokens_per_s / nic}}},
                 ""};
}

REGISTER_EXPERIMENT("cpp_bytes", "cpu", points, [](const Setting&) -> Measure { return run; });

}  // namespace
}  // namespace xpyd::experiments::cpp_bytes_experiment
