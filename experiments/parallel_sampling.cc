// parallel_sampling: what n choices of one prompt save by sharing its blocks (PagedAttention, SOSP'23, Fig. 15a).
//
// The real paged memory, blocks of 16: a prompt is reserved, forked into n, and each grows to its output's length, token
// by token. Saved: blocks of n sequences that share nothing, less those that are held, of the former. `at_end` counts them
// when all have their last token, `mean` over all tokens on the way. Requests of Alpaca's and ShareGPT's lengths.
//
// Arithmetic. Of p tokens floor(p / 16) blocks are shared to the end, and a block that is not full until the first token
// is written there. Alpaca (19.3 and 58.5 tokens): 0.9 of 5.4 blocks, (n - 1) / n of it: 8 % for 2, 14 % for 6. ShareGPT
// (161 and 338): 9.6 of 31.7: 15 and 25 %. On the way outputs are half as long: 1.5 times as much.
#include <algorithm>
#include <memory>

#include "allocator/kv_memory.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"

namespace xpyd::experiments::parallel_sampling_experiment {
namespace {

constexpr int kBlock = 16, kLongest = 2048;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* dataset : {"alpaca", "sharegpt"})
    for (int n : {2, 4, 6})
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"dataset", dataset}, {"n", n}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int n = point["n"];
  const Result<LengthSet> lengths = request_lengths(point["dataset"], setting.tiny ? 2 : 100, setting, int(point["sample"]));
  if (!lengths) return lengths.error();
  KvOptions kv{.shape = {1, 1, 8, Dtype::bf16}, .block_tokens = kBlock, .prefix_cache = false};
  const KvScheme& scheme = *find_kv_scheme("paged");
  kv.pool_bytes = size_t(n) * (2 * kLongest / kBlock) * scheme.block_bytes(kv);
  auto pool = make_block_pool(scheme.name, kv);
  if (!pool) return pool.error();
  const std::unique_ptr<KvMemory> memory = scheme.make(std::move(pool).value(), kv);
  double held_at_end = 0, alone_at_end = 0, held = 0, alone = 0;
  for (const Lengths& one : lengths.value().requests) {
    std::vector<KvHandle> choices;
    const std::vector<int32_t> prompt(size_t(one.prompt), 1), next(1, 2);
    const auto first = memory->reserve(prompt, 0);
    if (!first) return first.error();
    choices.push_back(first.value().handle);
    if (!memory->append(choices[0], one.prompt)) return Finding{{}, "a prompt does not fit"};
    memory->written(choices[0], prompt);
    while (int(choices.size()) < n) {
      const auto fork = memory->fork(choices[0]);
      if (!fork) return fork.error();
      choices.push_back(fork.value());
    }
    for (int i = 1; i <= one.output; ++i) {
      for (KvHandle choice : choices) {
        if (!memory->append(choice, 1)) return Finding{{}, "a token does not fit"};
        memory->written(choice, next);
      }
      const double now = memory->stats().active, each = n * ((one.prompt + i + kBlock - 1) / kBlock);
      held += now, alone += each;
      if (i == one.output) held_at_end += now, alone_at_end += each;
    }
    for (KvHandle choice : choices) memory->free(choice);
    memory->check_invariants();
  }
  return Finding{{{{"saved_at_end", 1 - held_at_end / alone_at_end}, {"saved_mean", 1 - held / alone}}}, ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("parallel_sampling", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::parallel_sampling_experiment
