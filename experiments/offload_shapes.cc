// offload_shapes: wde's KV offloading, experiment 1, over its eight model shapes: the seconds of 8,192 tokens' prefill
// in steps of 1,024, and of their KV out to the host and back; with their card's costs, and here.
//
// `card`: 150 TFLOP/s of a step's products (twice that in fp8; int4's weights are widened to 16 bit first) and 0.8
// TB/s, and 2.1 us or the bytes at 12 GB/s for each copy, of a block's layer, K or V: 512 blocks of 16 tokens.
// Arithmetic. 32B: 2 x 32.0e9 x 8,192 FLOP are 3.5 s, attention .15: 3.6 to 3.8 (published 3.69); 65,536 copies of 32
// KiB, 2.73 us each, 179 ms (.19 in, .21 out). 7B .90 (.84), 28,672 copies of 16 KiB 60 ms (.06). 3B .40 (.40), 36,864
// of 8 KiB 77 ms (.08). glm-9b .95 to 1.1 (1.08), 40,960 of 16 KiB 86 ms (.09). 8B .85 to .95 (.89), 32,768 of 32 KiB
// 90 ms (.09, .10). In fp8 products take half: 7B .47, 9B .5, 8B .47 (.53, .68, .56): theirs are 1.12 to 1.35 times as
// long, for quantising what goes in.
//
// `here`: out and in are measured of the same KV shapes over memory of this machine (Swapper: a pool in layer_major,
// scattered; 2.1 GB of the 32B and as much again twice do not fit beside the rest of a small machine: absent). A
// token's piece of a layer is 512 bytes to 2 KiB: .3 to 1.5 s for .3 to 1.1 GB at 1 to 6 GB/s. Prefill is measured of
// one layer of that shape in bf16, 256 tokens behind 3,968, the mean of 8,192, times its layers and 32: 100 to 150
// GFLOP/s, a thousandth of the card: 8B 2 x 7e9 x 8,192 / 130e9 = 880 s (500 to 2,000). So prefill / in is 300 to 3,000
// here, and 5 to 19 there: a link is not what a CPU lacks.
#include <memory>
#include <numeric>

#include "experiments/experiment.h"
#include "experiments/swapper.h"
#include "model/cost_model.h"
#include "model/model.h"

namespace xpyd::experiments::offload_shapes_experiment {
namespace {

constexpr int kTokens = 8192, kStep = 1024, kBlock = 16;
constexpr double kFlopsPerS = 150e12, kBytesPerS = .8e12, kCallS = 2.1e-6, kLinkBytesPerS = 12e9;

struct Shape {
  const char* name;
  int layers, hidden, intermediate, heads, kv_heads, vocab;
  double weight_bytes;  // of an element
  bool fp8;             // products of them
};
constexpr Shape kShapes[] = {{"Qwen2.5-32B-int4", 64, 5120, 27648, 40, 8, 152064, .5, false},
                             {"Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064, 2, false},
                             {"Qwen2.5-7B-fp8", 28, 3584, 18944, 28, 4, 152064, 1, true},
                             {"Qwen2.5-3B", 36, 2048, 11008, 16, 2, 151936, 2, false},
                             {"glm-4-9b", 40, 4096, 13696, 32, 4, 151552, 2, false},
                             {"glm-4-9b-fp8", 40, 4096, 13696, 32, 4, 151552, 1, true},
                             {"Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, 2, false},
                             {"Llama-3.1-8B-fp8", 32, 4096, 14336, 32, 8, 128256, 1, true}};

ModelConfig config_of(const Shape& s) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = s.layers, c.hidden = s.hidden, c.intermediate = s.intermediate;
  c.n_heads = s.heads, c.n_kv_heads = s.kv_heads, c.head_dim = 128;
  c.vocab = s.vocab, c.max_position = 32768;
  return c;
}

// Attention's products are in 16 bit whatever the weights are.
double card_prefill_s(const Shape& s) {
  const CostModel cost{.config = config_of(s)};
  double seconds = 0;
  for (int at = 0; at < kTokens; at += kStep) {
    const Work all = cost.prefill(kStep, at, at + kStep == kTokens),
               near = cost.prefill(kStep, 0, at + kStep == kTokens);
    const double attention = all.flops - near.flops;
    seconds += std::max(near.flops / (s.fp8 ? 2 : 1) / kFlopsPerS + attention / kFlopsPerS,
                        double(cost.config.parameters()) * s.weight_bytes / kBytesPerS);
  }
  return seconds;
}

// One layer, 256 tokens behind as many as 8,192 have before them in the mean.
double layer_s(const Shape& shape, const Setting& setting, ThreadTeam& team) {
  ModelConfig c = config_of(shape);
  c.n_layers = 1, c.vocab = 256;
  if (setting.tiny) c.hidden = 256, c.intermediate = 512, c.n_heads = 2, c.n_kv_heads = 1;
  const int n = setting.tiny ? 16 : 256, before = setting.tiny ? 64 : kTokens / 2 - n / 2;
  const auto weights = load_weights("", c, {.dtype = Dtype::bf16, .dummy = true}, team).value();
  const std::unique_ptr<Model> model = make_llama(weights, team, n, 1);
  const KvLayout layout{kv_shape(c, Dtype::bf16), KvOrder::layer_major, before + n, 1};
  std::vector<std::byte> memory(layout.pool_bytes());
  const int32_t table = 0, row = n - 1;
  const std::vector<KvView> views = {KvView{memory.data(), &layout, &table, 0}};
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), 0);
  const int32_t offsets[] = {0, n}, lengths[] = {before + n};
  std::vector<float> logits(size_t(c.vocab));
  const StepInput step{
      .token_ids = tokens, .q_offsets = offsets, .kv_lengths = lengths, .views = views, .logit_rows = {&row, 1}};
  RealClock clock;
  double best = 0;
  for (int round = 0; round < 3; ++round) {  // the first touches everything
    const double start = clock.now();
    model->forward(step, logits.data());
    const double took = clock.now() - start;
    if (round == 1 || took < best) best = took;
  }
  return best;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const Shape& s : kShapes) all.push_back({{"model", s.name}});
  return all;
}

Measure open(const Setting& setting) {
  auto team = std::make_shared<ThreadTeam>(std::max(1, int(std::thread::hardware_concurrency())));
  return [=](const Values& point) -> Result<Finding> {
    const std::string name = point["model"];
    const Shape& s = *std::ranges::find(kShapes, name, &Shape::name);
    const KvShape kv = kv_shape(config_of(s), Dtype::bf16);
    const double copies = 2. * s.layers * kTokens / kBlock, bytes = double(kTokens) * double(kv.token_bytes());
    const double card_copy_s = copies * std::max(kCallS, bytes / copies / kLinkBytesPerS);
    Finding found;
    Values row{{"copies", copies},
               {"copy_bytes", bytes / copies},
               {"card_prefill_s", card_prefill_s(s)},
               {"card_swap_s", card_copy_s}};
    // Codes are another shape's KV: it is measured once.
    if (s.weight_bytes == 2) {
      const int n = setting.tiny ? 64 : kTokens;
      auto swapper = Swapper::create(kv, KvOrder::layer_major, kBlock, n, true, 0, setting.seed);
      if (!swapper) return swapper.error();
      const Swap swap = swap_time(*swapper.value(), 1, found.wrong);
      if (!found.wrong.empty()) return found;
      const double prefill_s = layer_s(s, setting, *team) * s.layers * kTokens / 256;
      row.update({{"here_prefill_s", prefill_s}, {"here_out_s", swap.out_s}, {"here_in_s", swap.in_s}});
    } else {
      row.update({{"here_prefill_s", ""}, {"here_out_s", ""}, {"here_in_s", ""}});
    }
    found.rows.push_back(std::move(row));
    return found;
  };
}

REGISTER_EXPERIMENT("offload_shapes", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::offload_shapes_experiment
