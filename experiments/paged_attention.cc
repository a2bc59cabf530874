// paged_attention: what a block table costs attention, the same kernel over both memories.
//
// CPU: this machine's default kernel, 32 query heads, 8 KV heads of 128, bf16 KV, blocks in random
// order. decode: 4 sequences of 4,096 tokens, 67 MB of KV, larger than the caches whatever the
// block size (the published comparison held the number of blocks and let the bytes grow with their
// size). prefill: 1,024 tokens of one prompt.
//
// Arithmetic: a KV row of 8 heads is 2 KB, read in order inside a block; a block of 16 is 32 KB, so
// the prefetchers start anew every 512 lines. One table look-up and a division per row and head,
// beside 128 multiply-adds: below 5 %. Blocks of 1 are runs of 2 KB: up to 1.5 times slower.
// Prefill reads each row for many queries: no difference.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "attention/attention.h"
#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/stats.h"
#include "experiments/experiment.h"

namespace xpyd::experiments {
namespace {

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;

struct Sizes {
  int n_seqs, n_q, length;
};
Sizes sizes_of(const std::string& phase, bool tiny) {
  if (phase == "decode") return tiny ? Sizes{2, 1, 256} : Sizes{4, 1, 4096};
  return tiny ? Sizes{1, 64, 64} : Sizes{1, 1024, 1024};
}

// Block 0: contiguous.
std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* phase : {"prefill", "decode"})
    for (int block : {0, 1, 4, 16, 64, 256}) all.push_back({{"phase", phase}, {"block", block}});
  return all;
}

struct Problem {
  Problem(const Sizes& s, int block) {
    const int tokens = block == 0 ? s.length : block, per_seq = (s.length + tokens - 1) / tokens;
    layout = {{1, kKvHeads, kDim, Dtype::bf16}, KvOrder::layer_major, tokens, per_seq * s.n_seqs};
    pool = Buffer(layout.pool_bytes());
    Random random(1);
    std::vector<int32_t> blocks(size_t(layout.n_blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[random.below(i)]);
    tables = blocks;
    for (int i = 0; i < s.n_seqs; ++i) {
      const int32_t* table = tables.data() + i * per_seq;
      views.push_back(
          {pool.data(), &layout, block == 0 ? nullptr : table, block == 0 ? *table : 0});
      q_offsets.push_back((i + 1) * s.n_q);
      kv_lengths.push_back(s.length);
      // The same values at the same place of the sequence, whatever the memory.
      for (int t = 0; t < s.length; ++t)
        for (int kv = 0; kv < 2; ++kv)
          for (int h = 0; h < kKvHeads; ++h) {
            auto* row = reinterpret_cast<bf16*>(views.back().row(0, kv, t, h));
            Random values(uint64_t(((i * 65536 + t) * 2 + kv) * kKvHeads + h));
            for (int d = 0; d < kDim; ++d) row[d] = to_bf16(float(values.uniform() * 2 - 1));
          }
    }
    q.resize(size_t(s.n_seqs) * size_t(s.n_q) * kHeads * kDim);
    for (float& x : q) x = float(8 * (random.uniform() * 2 - 1));
    out.resize(q.size());
  }
  AttentionArgs args() {
    return {.q = q.data(),
            .out = out.data(),
            .q_offsets = q_offsets,
            .kv_lengths = kv_lengths,
            .views = views,
            .n_heads = kHeads,
            .scale = 1 / std::sqrt(float(kDim))};
  }
  // The last token of the last sequence, all heads, against double precision.
  std::string check() const {
    const size_t width = size_t(kHeads) * kDim, at = q.size() - width;
    std::vector<float> want(width);
    const int32_t one[] = {0, 1};
    attention_reference({.q = q.data() + at,
                         .out = want.data(),
                         .q_offsets = one,
                         .kv_lengths = {&kv_lengths.back(), 1},
                         .views = {&views.back(), 1},
                         .n_heads = kHeads,
                         .scale = 1 / std::sqrt(float(kDim))});
    for (size_t i = 0; i < width; ++i)
      if (!(std::abs(out[at + i] - want[i]) < 1e-3))
        return "element " + std::to_string(i) + " is off";
    return "";
  }

  KvLayout layout;
  Buffer pool;
  std::vector<int32_t> tables, q_offsets = {0}, kv_lengths;
  std::vector<KvView> views;
  std::vector<float> q, out;
};

Measure open(const Setting& setting) {
  auto team = std::make_shared<ThreadTeam>(std::max(1, int(std::thread::hardware_concurrency())));
  return [=](const Values& point) -> Result<Finding> {
    Problem problem(sizes_of(point["phase"], setting.tiny), point["block"]);
    const AttentionArgs args = problem.args();
    const AttentionVariant& variant = default_attention();
    variant.run(args, *team);
    if (std::string wrong = problem.check(); !wrong.empty()) return Finding{{}, wrong};
    RealClock clock;
    std::vector<double> samples;
    const double end = clock.now() + (setting.tiny ? 0 : 1.5);
    do {
      const double start = clock.now();
      variant.run(args, *team);
      samples.push_back(clock.now() - start);
    } while (clock.now() < end);
    const Work w = work(args);
    const Summary s = summarize(samples);
    return Finding{{{{"variant", variant.name},
                     {"ms", 1e3 * s.median},
                     {"ms_least", 1e3 * s.min},
                     {"gbps", 1e-9 * w.bytes / s.median},
                     {"gflops", 1e-9 * w.flops / s.median}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("paged_attention", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments
