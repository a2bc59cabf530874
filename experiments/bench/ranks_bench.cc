// The cost and gain of ranks: one model on two threads of one rank, on two tensor ranks, on two pipeline stages, and on
// four ranks that share two cores.
//
// Expected, for a step on all cores: two tensor ranks do the same work as two threads of one rank, split by columns and
// K-groups instead of panels. A rank waits for the others twice a layer (after o and down). The team of one rank waits
// some ten times, at every operation. Each wait takes about a microsecond while spinning. On the other hand, every rank
// computes all norms, adds and the embedding, and reads both halves of the sums. At 512 tokens and hidden 512 that is 2
// * 3 * 1 MB a layer, 0.2 ms at 30 GB/s, against 15 ms of products a layer at 200 GFLOP/s: 1 to 2 %. Two stages of one
// step compute one after the other, so a prefill or a decode step takes as long as on one thread.
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "experiments/bench/harness.h"
#include "model/model.h"

namespace xpyd::experiments {
namespace {

constexpr int kContext = 512, kPrompt = 512;

class RankedSteps {
 public:
  RankedSteps(const std::shared_ptr<const Weights>& weights, const ModelConfig& config, int tp, int pp,
              ThreadTeam& team)
      : config_(config) {
    const KvShards shards{.n_layers = config.n_layers, .n_kv_heads = config.n_kv_heads, .tp = tp, .pp = pp};
    model_ = tp * pp == 1 ? make_llama(weights, team, kPrompt, 1)
                          : make_sharded_llama(weights, {.shards = shards}, kPrompt, 1);
    for (int rank = 0; rank < shards.n_ranks(); ++rank) {
      layouts_.push_back({rank_shape(kv_shape(config, Dtype::f32), shards, rank), KvOrder::layer_major, kContext, 1});
      pools_.emplace_back(layouts_.back().pool_bytes());
      std::memset(pools_.back().data(), 0, pools_.back().size());
    }
    for (int rank = 0; rank < shards.n_ranks(); ++rank)
      views_.push_back({pools_[size_t(rank)].data(), &layouts_[size_t(rank)], nullptr, 0});
    Random random(1);
    for (int i = 0; i < kPrompt; ++i) tokens_.push_back(int32_t(random.below(uint64_t(config.vocab))));
    logits_.resize(size_t(config.vocab));
  }
  void set(int n, int length) {
    offsets_ = {0, n};
    lengths_ = {length};
    rows_ = {n - 1};
  }
  StepInput step() const {
    return {.token_ids = std::span(tokens_).first(size_t(offsets_[1])),
            .q_offsets = offsets_,
            .kv_lengths = lengths_,
            .views = views_,
            .logit_rows = rows_};
  }
  void run() { compute_step(*model_, step(), logits_.data()); }
  Work work() const { return model_->work(step()); }
  std::vector<float> prompt_logits() {
    set(kPrompt, kPrompt);
    run();
    return logits_;
  }

 private:
  ModelConfig config_;
  std::unique_ptr<Model> model_;
  std::vector<KvLayout> layouts_;
  std::vector<Buffer> pools_;
  std::vector<KvView> views_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_, offsets_, lengths_, rows_;
};

void bench_ranks(Bench& bench) {
  const std::string dir = "experiments/models/llama-mini";
  auto config = load_model_config(dir);
  XPYD_CHECK(config.ok(), config ? "" : config.error().message);
  const int threads = std::min(2, bench.max_threads());
  ThreadTeam& team = bench.team(threads);
  auto weights = load_weights(dir, config.value(), {.dtype = Dtype::bf16, .dummy = true}, team);
  XPYD_CHECK(weights.ok(), weights ? "" : weights.error().message);
  struct Shape {
    int tp, pp;
  };
  std::vector<std::unique_ptr<RankedSteps>> steps;
  const Shape shapes[] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}};
  for (Shape s : shapes)
    steps.push_back(std::make_unique<RankedSteps>(weights.value(), config.value(), s.tp, s.pp, team));
  const std::vector<float> expected = steps[0]->prompt_logits();
  for (auto [n, name] : {std::pair(1, "decode batch 1"), {kPrompt, "prefill 512"}}) {
    std::vector<BenchCase> cases;
    for (size_t i = 0; i < std::size(shapes); ++i) {
      RankedSteps& data = *steps[i];
      data.set(n, kContext);
      cases.push_back({.name = "llama-mini bf16, " + std::string(name) + ", tp " + std::to_string(shapes[i].tp) +
                               " pp " + std::to_string(shapes[i].pp),
                       .n_threads = threads,
                       .run = [&data] { data.run(); },
                       .check =
                           [&data, &expected, n_now = n] {
                             const std::vector<float> logits = data.prompt_logits();
                             data.set(n_now, kContext);
                             return std::memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)) == 0
                                        ? std::string()
                                        : std::string("the logits differ from those on one rank");
                           },
                       .work = data.work(),
                       .limit = Limit::roofline,
                       .target = 0,
                       .versus = {}});
    }
    bench.measure(cases);
  }
}

REGISTER_BENCH("ranks", bench_ranks);

}  // namespace
}  // namespace xpyd::experiments
