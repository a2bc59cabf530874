// block_table: what it costs the CPU to tell a kernel where each sequence's KV is, before every step.
//
// vAttention (ASPLOS'25) Table 1, section 3.3: making vLLM's block table, Python lists padded to
// the longest, took 30 % of a decode iteration, 10 % after a fix; of TensorRT-LLM's, 11 % with its
// Python front end. Contiguous memory needs an address for each sequence.
//
// Four ways for one decode step of `batch` sequences of about `tokens` tokens, blocks of 16, every sequence with one
// token more than before: `padded` writes a new [batch, longest] table; `diffs` keeps the table and writes what has
// changed; `views` gives each sequence's own list by its address (what this engine does, whose kernels take a pointer
// for each); `contiguous` an address each. Beside them the step itself by the cost model: Llama-3-8B on an A800 at 0.8
// of its bandwidth.
//
// Arithmetic. A list of 16K tokens is 1,024 ids, 4 KB: padded copies 64 of them, 256 KB, at 10 to
// 30 GB/s 9 to 26 us, and 0.1 to 1 ms if a list misses all caches; diffs writes 64 / 16 ids and
// looks at 64 lengths, below 1 us; views and contiguous 64 words or three, below 1 us. The step
// takes 16 GB of weights and 64 * 16K * 131 KB = 137 GB: 96 ms; so even padded is below 1 %. At 1K
// tokens: 16 KB in 1 us of a step of 17 ms. The published share is the language's, not the table's.
#include <algorithm>
#include <cstring>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "base/random.h"
#include "base/stats.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments::block_table_experiment {
namespace {

constexpr int kBlock = 16;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int tokens : setting.tiny ? std::vector{64} : std::vector{1024, 16384})
    for (int batch : setting.tiny ? std::vector{2} : std::vector{8, 64, 256})
      all.push_back({{"batch", batch}, {"tokens", tokens}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int batch = point["batch"], tokens = point["tokens"], steps = setting.tiny ? 60 : 400;
  Random random(setting.seed);
  // Lists that grow, as a paged memory's do, of ragged sequences.
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(batch));
  std::vector<int> lengths(lists.size());
  size_t longest = 0;
  for (size_t s = 0; s < lists.size(); ++s) {
    lengths[s] = tokens - int(random.below(size_t(tokens) / 8));
    lists[s].resize(size_t(lengths[s] + kBlock - 1) / kBlock);
    for (int32_t& id : lists[s]) id = int32_t(random.below(1 << 20));
    longest = std::max(longest, lists[s].size() + size_t(steps) / kBlock + 1);
  }
  std::vector<int32_t> padded, kept(lists.size() * longest, -1);
  std::vector<size_t> known(lists.size(), 0);  // of a kept row
  std::vector<KvView> views(lists.size()), slots(lists.size());
  const KvLayout layout{{1, 1, 1, Dtype::f32}, KvOrder::layer_major, kBlock, 1 << 20};
  std::byte pool{};
  RealClock clock;
  std::vector<double> us[4];
  const char* const ways[] = {"padded", "diffs", "views", "contiguous"};
  for (int step = 0; step < steps; ++step) {
    for (size_t s = 0; s < lists.size(); ++s)
      if (lengths[s]++ % kBlock == 0) lists[s].push_back(int32_t(random.below(1 << 20)));
    for (int turn = 0; turn < 4; ++turn) {
      const int way = (turn + step) % 4;
      const double start = clock.now();
      if (way == 0) {
        size_t widest = 0;
        for (const auto& list : lists) widest = std::max(widest, list.size());
        padded.assign(lists.size() * widest, -1);
        for (size_t s = 0; s < lists.size(); ++s)
          std::memcpy(&padded[s * widest], lists[s].data(), lists[s].size() * sizeof(int32_t));
      } else if (way == 1) {
        for (size_t s = 0; s < lists.size(); ++s)
          for (; known[s] < lists[s].size(); ++known[s]) kept[s * longest + known[s]] = lists[s][known[s]];
      } else if (way == 2) {
        for (size_t s = 0; s < lists.size(); ++s) views[s] = {&pool, &layout, lists[s].data(), 0};
      } else {
        for (size_t s = 0; s < lists.size(); ++s) slots[s] = {&pool, &layout, nullptr, int32_t(s)};
      }
      if (step > 0) us[way].push_back(1e6 * (clock.now() - start));  // first: all of `kept` is new
    }
    const size_t widest = padded.size() / lists.size();
    for (size_t s = 0; s < lists.size(); ++s)
      for (size_t b = 0; b < lists[s].size(); ++b)
        if (padded[s * widest + b] != lists[s][b] || kept[s * longest + b] != lists[s][b] ||
            views[s].block_table[b] != lists[s][b])
          return Finding{{}, "two ways to tell where KV is differ"};
  }
  disagg::Hardware card = disagg::find_hardware("a800x1").value();
  card.mfu = .5, card.mbu = .8, card.step_s = 0;
  model::StepShape decode;
  decode.add_decodes(batch, double(batch) * tokens);
  const double step_us = 1e6 *
                         disagg::step_cost(disagg::find_simulated_model("llama-3-8b").value(), card).seconds(decode);
  Finding found;
  for (int way = 0; way < 4; ++way) {
    std::sort(us[way].begin(), us[way].end());
    const double median = percentile_seen(us[way], 50);
    found.rows.push_back(
        {{"way", ways[way]}, {"us", median}, {"step_us", step_us}, {"share", median / (median + step_us)}});
  }
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("block_table", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::block_table_experiment
