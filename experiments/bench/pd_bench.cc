// P and D side by side, one core each, against both phases taking turns on both cores.
//
// Arithmetic: prefill is bound by FMA, decode by reading weights. Taking turns, each phase has both cores and leaves
// the other resource idle. Side by side each has one core; decode alone on one core reaches 0.75-0.8 of the two-core
// bandwidth (25 of 33 GB/s), prefill alone one half of the two-core FMA rate. So the sum of the two fractions is about
// 0.5 + 0.75 less what they take from each other: 1.07 to 1.18.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/clock.h"
#include "base/stats.h"
#include "experiments/bench/harness.h"
#include "model/model.h"

namespace xpyd::experiments {
namespace {

constexpr int kPromptTokens = 128;  // of one prefill step
constexpr int kContext = 512;       // tokens of each decoding sequence
constexpr int kBatch = 4;           // decoding sequences

// One phase: a step over its own KV, repeated.
class Phase {
 public:
  Phase(std::shared_ptr<const Weights> weights, ThreadTeam& team, bool prefill)
      : model_(make_llama(std::move(weights), team, kPromptTokens, kBatch)) {
    int n = prefill ? 1 : kBatch;
    layout_ = {kv_shape(model_->config(), Dtype::bf16), KvOrder::layer_major, prefill ? kPromptTokens : kContext, n};
    pool_ = Buffer(layout_.pool_bytes());
    logits_.resize(size_t(model_->config().vocab) * size_t(n));
    for (int i = 0; i < n; ++i) {
      views_.push_back({pool_.data(), &layout_, nullptr, i});
      kv_lengths_.push_back(layout_.block_tokens);
      q_offsets_.push_back(i + 1);
      logit_rows_.push_back(i);
    }
    tokens_.assign(size_t(prefill ? kPromptTokens : n), 17);
    if (prefill) {
      q_offsets_ = {0, kPromptTokens};
      logit_rows_ = {kPromptTokens - 1};
    } else {
      q_offsets_.insert(q_offsets_.begin(), 0);
    }
  }
  void step() { model_->forward({tokens_, q_offsets_, kv_lengths_, views_, logit_rows_, nullptr}, logits_.data()); }
  int tokens() const { return int(tokens_.size()); }

 private:
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer pool_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_, q_offsets_, kv_lengths_, logit_rows_;
  std::vector<KvView> views_;
};

// The calling thread, which would inherit the bench's own place, to one cpu.
void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Tokens per second of `phase` over at least `seconds`.
double rate(Phase& phase, double seconds, Clock& clock) {
  double start = clock.now(), end = start;
  int64_t tokens = 0;
  while (end - start < seconds) {
    phase.step();
    tokens += phase.tokens();
    end = clock.now();
  }
  return double(tokens) / (end - start);
}

void bench_pd(Bench& bench) {
  const std::string dir = "experiments/models/llama-1b";
  Result<ModelConfig> config = load_model_config(dir);
  if (!config || bench.max_threads() < 2) {
    std::printf("not run: needs 2 threads and %s\n", dir.c_str());
    return;
  }
  ThreadTeam& both = bench.team(2);
  auto weights = load_weights(dir, config.value(), {.dtype = Dtype::bf16, .dummy = true}, both).value();
  ThreadTeam first(1), second(1);
  Phase prefill_both(weights, both, true), decode_both(weights, both, false);
  Phase prefill_one(weights, first, true), decode_one(weights, second, false);
  RealClock clock;
  std::vector<double> sums, prefill_shares, decode_shares;
  int rounds = std::max(3, bench.options().rounds / 3);
  for (int round = 0; round <= rounds; ++round) {
    double seconds = round == 0 ? 0.1 : 2.0;  // the first is the warm-up
    double prefill = rate(prefill_both, seconds, clock), decode = rate(decode_both, seconds, clock);
    std::atomic<bool> stop{false};
    double decode_beside = 0;
    std::thread decoder([&] {
      pin_to(1);
      double start = clock.now();
      int64_t tokens = 0;
      while (!stop.load()) {
        decode_one.step();
        tokens += decode_one.tokens();
      }
      decode_beside = double(tokens) / (clock.now() - start);
    });
    double prefill_beside = 0;
    std::thread([&] {
      pin_to(0);
      prefill_beside = rate(prefill_one, seconds, clock);
    }).join();
    stop = true;
    decoder.join();
    if (round == 0) continue;
    prefill_shares.push_back(prefill_beside / prefill);
    decode_shares.push_back(decode_beside / decode);
    sums.push_back(prefill_shares.back() + decode_shares.back());
  }
  Summary prefill = summarize(prefill_shares), decode = summarize(decode_shares);
  std::printf("side by side: prefill keeps %.3f and decode %.3f of its speed on both cores\n", prefill.median,
              decode.median);
  std::sort(sums.begin(), sums.end());
  bench.report({.name = "1P1D on two cores, llama-1b bf16",
                .n_threads = 2,
                .rounds = rounds,
                .measure = "x time-slicing both phases",
                .share = percentile(sums, 50),
                .share_p10 = percentile(sums, 10),
                .share_p90 = percentile(sums, 90),
                .target = 1.07});
}

REGISTER_BENCH("pd", bench_pd);

}  // namespace
}  // namespace xpyd::experiments
