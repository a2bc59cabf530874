// Prefill of 512 tokens behind 2048 cached ones, and decode of 8 sequences of 4096 tokens: 32 query heads, 8 KV heads,
// head_dim 128, over contiguous and paged memory, both layouts, every dtype of KV.
//
// Expected, prefill: 4 * 128 useful FLOPs per (query, head, key), of which there are 512 * 32 * 2304.5: 19.3 GFLOP.
// Both products run in FMA tiles of 6 x 16 at about 97 % of the peak. exp, masks and rescaling of 64 scores take about
// 80 cycles beside 2 * 512 of FMAs, and packing K and V takes 2-3 %. Together: 85 %.
// Expected, decode: 268 MB in f32, 134 MB in bf16. For 64 elements of K and 64 of V with 4 query heads, a core needs
// about 75 cycles (32 of FMAs, 17-20 of transposing K). At 3.1 GHz that is 512 B / 75 cycles = 21 GB/s in f32 and 10.7
// GB/s in bf16. So two cores are bound by memory in f32 and by arithmetic in bf16. int8 and int4 are 69 MB and 36 MB
// (132 and 68 bytes a row).
//
// Expected, dtypes beside each other: heads of 64 dims, as in Llama-3.2-1B, and of 128 dims. K and V of one token and KV
// head are 8 head_dim products of 4 query heads. The number of instructions binds; a core of Zen 3 or Zen 4 dispatches 6
// a cycle. With AVX2 and 64 dims bf16 needs 291 instructions, int8 219 and int4 179 (callgrind): 1.33 x and 1.62 x bf16.
// With 128 dims they are 516, 351 and 266: 1.47 x and 1.94 x. The targets are 1.3 and 1.6. attention/cpu/README.md
// splits the counts.
//
// Expected, blocks of 1 to 256 tokens, f32, 268 MB for each: K of a token in one layer is 4 KiB, and a block of 16 is
// 64 KiB. From there on a block is 16 adjacent pages, and a change of block restarts the prefetchers' stream once in 16
// rows: at least 0.97 of contiguous. With blocks of one, every row begins on another page, and the prefetchers lose
// each stream after 4 KiB: 0.6 to 0.9.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/device/page_groups.h"
#include "base/memory.h"
#include "base/random.h"
#include "experiments/bench/harness.h"

namespace xpyd::experiments {
namespace {

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kLayers = 2, kBatch = 8, kContext = 4096;

// KV of 8 x 4096 tokens in two layers, uniform in [-1, 1). Every layout reads the same pool in its own way.
Buffer random_pool(Dtype dtype, int dim = kDim) {
  KvShape shape = {kLayers, kKvHeads, dim, dtype};
  Buffer pool(size_t(kBatch) * kContext * shape.token_bytes());
  Random random(1);
  std::vector<float> x(static_cast<size_t>(dim));
  for (size_t at = 0; at < pool.size(); at += shape.row_bytes()) {
    for (float& y : x) y = float(2 * random.uniform() - 1);
    write_kv_row(dtype, dim, x.data(), pool.data() + at);
  }
  return pool;
}

// The same bytes at contiguous addresses over page groups in random order. With `in_order`, one allocation in pages of
// 4 KiB, as groups have them, where anonymous memory would have huge pages.
std::unique_ptr<VirtualRange> in_groups(const Buffer& pool, size_t group, bool in_order = false) {
  const int n = int(pool.size() / group);
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Random random(3);
  for (size_t i = order.size(); i > 1 && !in_order; --i) std::swap(order[i - 1], order[random.below(i)]);
  auto groups = make_host_page_groups({.group_bytes = group, .n_groups = n}).value();
  auto range = groups->reserve(pool.size()).value();
  for (int i = 0; i < n; ++i) {
    XPYD_CHECK(range->map(size_t(i) * group, order[size_t(i)], 1).ok());
    std::memcpy(range->data() + size_t(i) * group, pool.data() + size_t(i) * group, group);
  }
  return range;
}

struct Problem {
  KvLayout layout;
  std::vector<std::vector<int32_t>> tables;
  std::vector<KvView> views;
  std::vector<int32_t> q_offsets = {0}, kv_lengths;
  std::vector<float> q, out;
  AttentionArgs args;
  const AttentionVariant* variant = &default_attention();

  // block_tokens == kContext means contiguous. The blocks of a sequence are in random order.
  Problem(std::byte* pool, Dtype dtype, KvOrder order, int block_tokens, int n_seqs, int n_q, int kv_length,
          int dim = kDim)
      : layout{{kLayers, kKvHeads, dim, dtype}, order, block_tokens, kBatch * kContext / block_tokens},
        tables(size_t(n_seqs)) {
    std::vector<int32_t> free(size_t(layout.n_blocks));
    std::iota(free.begin(), free.end(), 0);
    Random random(2);
    for (size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[random.below(i)]);
    for (int s = 0; s < n_seqs; ++s) {
      for (int t = 0; t < kv_length; t += block_tokens) tables[size_t(s)].push_back(free.back()), free.pop_back();
      bool paged = block_tokens < kContext;
      views.push_back({pool, &layout, paged ? tables[size_t(s)].data() : nullptr, paged ? 0 : tables[size_t(s)][0]});
      q_offsets.push_back(q_offsets.back() + n_q);
      kv_lengths.push_back(kv_length);
    }
    q.resize(size_t(n_seqs) * size_t(n_q) * kHeads * size_t(dim));
    for (float& x : q) x = float(2 * random.uniform() - 1);
    out.resize(q.size());
    args = {.q = q.data(),
            .out = out.data(),
            .q_offsets = q_offsets,
            .kv_lengths = kv_lengths,
            .views = views,
            .layer = 1,
            .n_heads = kHeads,
            .sliding_window = 0,
            .scale = 1 / std::sqrt(float(dim))};
  }
  Problem(const Problem&) = delete;

  // Compares the first and last query token of the first and last sequence with double precision. |V| < 1, so a chain
  // of n rounded sums with weights that are off by at most 3e-6 stays within this bound.
  std::string check(ThreadTeam& team) {
    std::fill(out.begin(), out.end(), NAN);
    variant->run(args, team);
    size_t row = size_t(kHeads) * size_t(layout.shape.head_dim);
    for (size_t s : {size_t(0), views.size() - 1})
      for (int i : {q_offsets[s], q_offsets[s + 1] - 1}) {
        std::vector<float> want(row);
        int32_t one[] = {0, 1}, length[] = {kv_lengths[s] - (q_offsets[s + 1] - 1 - i)};
        AttentionArgs single = args;
        single.q = q.data() + size_t(i) * row, single.out = want.data();
        single.q_offsets = one, single.kv_lengths = length;
        single.views = std::span(views).subspan(s, 1);
        attention_reference(single);
        double bound = 6e-6 + 2 * length[0] * 0x1p-24;
        if (layout.shape.quantised()) bound += layout.shape.dtype == Dtype::int8 ? 1e-4 : 3e-2;  // quantised_rows.h
        for (size_t d = 0; d < row; ++d)
          if (!(std::abs(double(out[size_t(i) * row + d]) - double(want[d])) <= bound))
            return "token " + std::to_string(i) + ", element " + std::to_string(d) + " is " +
                   std::to_string(out[size_t(i) * row + d]) + ", expected " + std::to_string(want[d]);
      }
    return "";
  }
};

struct Kind {
  const char* name;
  int n_seqs, n_q, kv_length;
  Limit limit;
};

// Decode of the same tokens in every dtype, in the same rounds, by each row of the table except the portable one.
void compare_dtypes(Bench& bench, int dim) {
  constexpr double kShares[] = {0.80, 0.75, 0.65, 0, 0, 0};  // of kKvDtypes
  std::vector<Buffer> pools;
  for (Dtype dtype : kKvDtypes) pools.push_back(random_pool(dtype, dim));
  const int threads = bench.max_threads();
  ThreadTeam& team = bench.team(threads);
  for (int block : {kContext, 16}) {
    std::vector<std::unique_ptr<Problem>> problems;
    std::vector<BenchCase> cases;
    for (const AttentionVariant& variant : attention_variants()) {
      if (!variant.available() || variant.needs == Isa::portable) continue;
      auto name = [&](Dtype dtype) {
        return std::string(variant.name) + " decode beside each other, " + std::to_string(dim) + " dims, " +
               dtype_name(dtype) + (block == kContext ? ", contiguous" : ", paged 16");
      };
      for (size_t i = 0; i < std::size(kKvDtypes); ++i) {
        problems.push_back(std::make_unique<Problem>(pools[i].data(), kKvDtypes[i], KvOrder::layer_major, block, kBatch,
                                                     1, kContext, dim));
        Problem* p = problems.back().get();
        p->variant = &variant;
        cases.push_back({.name = name(kKvDtypes[i]),
                         .n_threads = threads,
                         .run = [p, &team] { p->variant->run(p->args, team); },
                         .check = [p, &team] { return p->check(team); },
                         .work = work(p->args),
                         .limit = Limit::read,
                         .target = kShares[i]});
        if (i < 2) continue;
        BenchCase again = cases.back();
        again.name += std::string(" against bf16");
        again.target = i == 2 ? 1.3 : i == 3 ? 1.6 : 0;
        again.versus = {name(Dtype::bf16)};
        cases.push_back(again);
      }
    }
    bench.measure(cases);
  }
}

// Decode of the same tokens in blocks of each size.
void compare_blocks(Bench& bench) {
  Buffer pool = random_pool(Dtype::f32);
  const int threads = bench.max_threads();
  ThreadTeam& team = bench.team(threads);
  const std::string name = "decode, blocks of ", contiguous = "decode, contiguous";
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<BenchCase> cases;
  for (int block : {kContext, 1, 4, 16, 64, 256}) {
    problems.push_back(
        std::make_unique<Problem>(pool.data(), Dtype::f32, KvOrder::layer_major, block, kBatch, 1, kContext));
    Problem* p = problems.back().get();
    const bool whole = block == kContext;
    cases.push_back({.name = whole ? contiguous : name + std::to_string(block),
                     .n_threads = threads,
                     .run = [p, &team] { p->variant->run(p->args, team); },
                     .check = [p, &team] { return p->check(team); },
                     .work = work(p->args),
                     .limit = Limit::read,
                     .target = !whole && block >= 16 ? 0.97 : 0});
    if (!whole) cases.back().versus = {contiguous};
  }
  bench.measure(cases);
}

void bench_attention(Bench& bench) {
  const Kind kinds[] = {{"prefill 512 on 2048", 1, 512, 2560, Limit::fma},
                        {"decode 8 x 4096", kBatch, 1, kContext, Limit::read}};
  for (Dtype dtype : kKvDtypes) {
    Buffer pool = random_pool(dtype);
    const std::unique_ptr<VirtualRange> groups = in_groups(pool, 65536), whole = in_groups(pool, 65536, true),
                                        huge = in_groups(pool, size_t(2) << 20);
    for (const Kind& kind : kinds) {
      auto make = [&](KvOrder order, int block, std::byte* data = nullptr) {
        return std::make_unique<Problem>(data ? data : pool.data(), dtype, order, block, kind.n_seqs, kind.n_q,
                                         kind.kv_length);
      };
      struct {
        const char* name;
        std::unique_ptr<Problem> problem;
      } memories[] = {{"contiguous", make(KvOrder::layer_major, kContext)},
                      {"paged 16", make(KvOrder::layer_major, 16)},
                      {"contiguous, token_major", make(KvOrder::token_major, kContext)},
                      {"paged 16, token_major", make(KvOrder::token_major, 16)},
                      {"vattention 64 KiB", make(KvOrder::layer_major, kContext, groups->data())},
                      {"contiguous, pages of groups", make(KvOrder::layer_major, kContext, whole->data())},
                      {"vattention 2 MiB", make(KvOrder::layer_major, kContext, huge->data())}};
      std::vector<BenchCase> cases;
      for (int threads = 1; threads <= bench.max_threads();
           threads = threads == 1 && bench.max_threads() > 1 ? bench.max_threads() : threads + 1) {
        ThreadTeam& team = bench.team(threads);
        std::string prefix = std::string(dtype_name(dtype)) + " " + kind.name + ", ";
        auto add = [&](int memory, const std::string& name, double target, std::vector<std::string> versus) {
          Problem* p = memories[memory].problem.get();
          cases.push_back({.name = prefix + name,
                           .n_threads = threads,
                           .run = [p, &team] { p->variant->run(p->args, team); },
                           .check = [p, &team] { return p->check(team); },
                           .work = work(p->args),
                           .limit = kind.limit,
                           .target = target,
                           .versus = std::move(versus)});
        };
        // The targets hold for all threads, over the memory that the server uses.
        bool all = threads == bench.max_threads();
        double target = kind.limit == Limit::fma ? 0.7 : dtype == Dtype::f32 ? 0.8 : 0.75;
        // Arithmetic binds these dtypes. compare_dtypes() has their targets.
        if (dtype_bits(dtype) <= 8 && kind.limit == Limit::read) target = 0;
        add(0, memories[0].name, all ? target : 0, {});
        if (!all) continue;
        for (int m = 1; m < 4; ++m) add(m, memories[m].name, m == 1 ? target : 0, {});
        add(1, "paged 16 again", 0.97, {prefix + memories[0].name});
        add(5, memories[5].name, 0, {prefix + memories[0].name});
        add(4, memories[4].name, 0.97, {prefix + memories[0].name});
        add(6, memories[6].name, 0.97, {prefix + memories[0].name});
        add(4, std::string(memories[4].name) + ", the same pages", 0.97, {prefix + memories[5].name});
      }
      bench.measure(cases);
    }
  }
  for (int dim : {64, kDim}) compare_dtypes(bench, dim);
  compare_blocks(bench);
}

REGISTER_BENCH("attention", bench_attention);

}  // namespace
}  // namespace xpyd::experiments
