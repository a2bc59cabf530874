// P and D side by side with one core each, against both phases in turn on both cores.
//
// Expected: prefill is bound by FMA, decode by reading weights. In turn, each phase has both cores and leaves the other
// resource idle. Side by side, each phase has one core. Decode on one core alone reaches 0.75-0.8 of the bandwidth of
// two cores (25 of 33 GB/s), and prefill on one core half of the FMA rate of two. So the sum of the two fractions is
// about 0.5 + 0.75, less what the phases take from each other: 1.07 to 1.18.
//
// The knee: D with batch B reads W bytes and computes 2 P B products, P = 1.24e9. One core has 15 GB/s and 85 GFLOP/s.
// In bf16, reading takes 165 ms and each sequence 29 ms, so reading binds up to B = 5.7; in int8, with 136 GFLOP/s, up
// to 4.5. Beyond that the same resource binds D and P, and the sum is 1. A faster prefill changes nothing at a given B.
// If D's products are twice as fast, the knee is at twice the batch. Measured on Zen 3, two cores, 3 rounds: bf16 1.08,
// 1.20, 1.17, 1.04, 1.00, 0.99 for B = 1, 2, 4, 8, 16, 32; int8 1.22, 1.11, 1.09, 0.95 up to 8.
#include <algorithm>
#include <atomic>
#include <thread>

#include "base/clock.h"
#include "experiments/bench/harness.h"
#include "experiments/bench/model_case.h"
#include "experiments/stats.h"
#include "experiments/bench/on_cpus.h"
#include "model/gemm/gemm.h"
#include "model/model.h"

namespace xpyd::experiments {
namespace {

constexpr int kPromptTokens = 64;  // of one prefill step
constexpr int kContext = 512;      // tokens of each decoding sequence

struct PdWeights {
  const char* name;
  model::LoadOptions options;
  bool exact;
};
const PdWeights kPdWeights[] = {{"bf16, exact", {.dtype = Dtype::bf16, .dummy = true}, true},
                                {"bf16", {.dtype = Dtype::bf16, .dummy = true}, false},
                                {"int8", {.dtype = Dtype::bf16, .weight_dtype = Dtype::int8, .dummy = true}, false}};

// Tokens per second of `phase` over at least `seconds`.
double rate(ModelCase& phase, double seconds, Clock& clock) {
  double start = clock.now(), end = start;
  int64_t tokens = 0;
  while (end - start < seconds) {
    phase.run();
    tokens += int64_t(phase.step().token_ids.size());
    end = clock.now();
  }
  return double(tokens) / (end - start);
}

// One round: both phases in turn on both cores, then side by side. Returns the tokens/s of prefill and decode, in turn
// and side by side.
struct PdRound {
  double prefill, decode, prefill_beside, decode_beside;
};
PdRound pd_round(ModelCase& prefill, ModelCase& decode, ModelCase& prefill_one, ModelCase& decode_one,
                 const std::vector<int>& cpus, double seconds) {
  RealClock clock;
  PdRound round = {rate(prefill, seconds, clock), rate(decode, seconds, clock), 0, 0};
  std::atomic<bool> stop{false};
  std::thread decoder([&] {
    const OnCpus here({&cpus[1], 1});
    double start = clock.now();
    int64_t tokens = 0;
    while (!stop.load()) {
      decode_one.run();
      tokens += int64_t(decode_one.step().token_ids.size());
    }
    round.decode_beside = double(tokens) / (clock.now() - start);
  });
  std::thread([&] {
    const OnCpus here({&cpus[0], 1});
    round.prefill_beside = rate(prefill_one, seconds, clock);
  }).join();
  stop = true;
  decoder.join();
  return round;
}

void bench_pd(Bench& bench) {
  const std::vector<int>& cpus = bench.cpus();
  if (cpus.size() < 2 || bench.max_threads() < 2) {
    std::printf("not run: it needs two cores\n");
    return;
  }
  ThreadTeam& both = bench.team(2);
  ThreadTeam first(1), second(1);
  const int rounds = std::max(3, bench.options().rounds / 3);
  std::shared_ptr<const Weights> weights;
  const PdWeights* loaded = nullptr;
  for (const PdWeights& row : kPdWeights) {
    const GemmVariant& gemm = default_gemm(row.exact);
    if (loaded && row.options.weight_dtype == loaded->options.weight_dtype) {
      if (gemm.needs != Isa::avx512_bf16) continue;  // without products of bf16, its two rows are the same
    } else {
      weights.reset();
      weights = llama_1b(row.options, both);
      loaded = &row;
    }
    const auto phase = [&](ThreadTeam& team, int batch, int n, int context) {
      auto made = std::make_unique<ModelCase>(weights, team, context, batch, batch * n, Dtype::bf16,
                                              Kernels{.gemm = &gemm});
      made->set(batch, n, context);
      return made;
    };
    const auto prefill = phase(both, 1, kPromptTokens, kPromptTokens);
    const auto prefill_one = phase(first, 1, kPromptTokens, kPromptTokens);
    for (int batch : {1, 2, 4, 8, 16, 32}) {
      const auto decode = phase(both, batch, 1, kContext), decode_one = phase(second, batch, 1, kContext);
      pd_round(*prefill, *decode, *prefill_one, *decode_one, cpus, 0.1);  // the warm-up
      std::vector<double> sums, prefill_shares, decode_shares;
      for (int i = 0; i < rounds; ++i) {
        const PdRound r = pd_round(*prefill, *decode, *prefill_one, *decode_one, cpus, 1.0);
        prefill_shares.push_back(r.prefill_beside / r.prefill);
        decode_shares.push_back(r.decode_beside / r.decode);
        sums.push_back(prefill_shares.back() + decode_shares.back());
      }
      std::sort(sums.begin(), sums.end());
      std::printf(
          "%s, %s: prefill on one core keeps %.3f of its speed on both cores, decode of a batch of %d keeps %.3f\n",
          row.name, gemm.name, summarize(prefill_shares).median, batch, summarize(decode_shares).median);
      bench.report(
          {.name = std::string("1P1D on two cores, llama-1b ") + row.name + ", D's batch " + std::to_string(batch),
           .n_threads = 2,
           .rounds = rounds,
           .measure = "x time-slicing both phases",
           .share = percentile(sums, 50),
           .share_p10 = percentile(sums, 10),
           .share_p90 = percentile(sums, 90),
           .target = batch == 4 && row.options.weight_dtype == std::nullopt ? 1.07 : 0});
    }
  }
}

REGISTER_BENCH("pd", bench_pd);

}  // namespace
}  // namespace xpyd::experiments
