// The cost of proposing drafts for a sequence in a step. Target: at most 2 us.
//
// 64 sequences in turn, so that no index is in the caches from the last call. Each has 4,096 tokens and gets one more
// between two calls. `repeats` has a period of 50 tokens, is found at once, and gives 8 drafts. `new` has random ids
// below 128,256, and nothing is found.
//
// Expected: three n-grams are looked up and three are inserted. That is 6 misses of 64 entries each, or 8 drafts in a
// row: 0.1 to 0.6 us.
#include <algorithm>

#include "base/clock.h"
#include "base/random.h"
#include "batch/speculation/ngram.h"
#include "experiments/bench/harness.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

constexpr int kProposers = 64, kTokensEach = 4096, kCalls = 200;
constexpr double kProposeBudget = 2e-6;

double propose_seconds(bool repeats) {
  const auto drafter = make_ngram_drafter();
  Random random(7);
  struct Proposer {
    std::vector<int32_t> tokens;
    std::unique_ptr<DraftMemory> memory;
  };
  std::vector<Proposer> all(kProposers);
  const auto next = [&](Proposer& p) {
    p.tokens.push_back(repeats && p.tokens.size() >= 50 ? p.tokens[p.tokens.size() - 50]
                                                        : int32_t(random.below(128256)));
  };
  for (Proposer& p : all)
    while (p.tokens.size() < kTokensEach) next(p);
  RealClock clock;
  double seconds = 0;
  size_t found = 0;
  std::vector<DraftWish> wishes;
  for (int call = -1; call < kCalls; ++call) {  // the first call reads the prompts
    wishes.clear();
    for (Proposer& p : all)
      next(p), wishes.push_back({.sequence = nullptr, .tokens = p.tokens, .memory = p.memory, .most = 8});
    const double start = clock.now();
    drafter->draft(wishes);
    if (call >= 0) seconds += clock.now() - start;
    for (const DraftWish& wish : wishes) found += wish.drafts.size();
  }
  XPYD_CHECK(repeats ? found == size_t{8} * kProposers * (kCalls + 1) : found < 1000);
  return seconds / kCalls / kProposers;
}

void bench_speculate(Bench& bench) {
  struct Row {
    const char* name;
    bool repeats;
    std::vector<double> seconds = {};
  } rows[] = {{"ngram, repeats", true}, {"ngram, new", false}};
  for (int round = 0; round < bench.options().rounds; ++round)
    for (Row& row : rows) row.seconds.push_back(propose_seconds(row.repeats));
  for (Row& r : rows) {
    std::sort(r.seconds.begin(), r.seconds.end());
    BenchRow row{.name = r.name, .n_threads = 1, .rounds = int(r.seconds.size())};
    row.seconds = percentile(r.seconds, 50);
    row.measure = "of a budget of 2 us (budget / time)";
    row.share = kProposeBudget / row.seconds;
    row.share_p10 = kProposeBudget / percentile(r.seconds, 90);
    row.share_p90 = kProposeBudget / percentile(r.seconds, 10);
    row.target = 1;
    bench.report(row);
  }
}

REGISTER_BENCH("speculate", bench_speculate);

}  // namespace
}  // namespace xpyd::experiments
