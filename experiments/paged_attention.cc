// paged_attention: What do a block table and page groups cost attention, with the same kernel over each memory?
// Paper: vAttention (ASPLOS'25) Table 1, Figs. 2, 3, 7, 8, 14; PagedAttention (SOSP'23) Fig. 18.
// Set-up: this machine's default kernel with 32 query heads, 8 KV heads of 128, bf16, over each memory in turn. Blocks
//   and page groups are in random order, and all outputs have the same bits. decode: 4 sequences of 4,096 tokens.
//   prefill: 1,024 tokens of one prompt. "whole" is one mapping of pages of 4 KiB.
// Command: make exp-paged_attention (3 minutes; measured, virtual, counted).
// Expected: a KV row is 2 KB. One look-up and a division stand beside 128 multiply-adds of a head: below 5 %. Blocks of
//   1 are runs of 2 KB: up to 1.5 times slower. Page groups are read like one allocation, and huge pages save up to 5
//   %. In token_major with 8 layers each row is on another page: up to 1.7 times.
// Found: blocks of 16 cost 8 % in decode and nothing in prefill on this CPU, and 2 and 4 % on an H100.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/thread_team.h"
#include "batch/engine/engine.h"
#include "experiments/attention_case.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"
#include "experiments/simulate/hardware.h"
#include "experiments/tally.h"
#include "experiments/timed_model.h"
#include "model/model.h"

namespace xpyd::experiments::paged_attention_experiment {
namespace {

namespace memories {

// "whole" is one mapping of pages of 4 KiB in order.
std::vector<AttentionMemory> memories_of(const AttentionShape& shape) {
  std::vector<AttentionMemory> all = {{"contiguous"}};
  for (int block : {1, 4, 16, 64, 256}) all.push_back({"paged", block});
  const KvLayout layout{
      {1, shape.n_kv_heads, shape.head_dim, shape.dtype}, KvOrder::layer_major, shape.length, shape.n_seqs};
  all.push_back({.name = "whole", .group = 4096, .in_order = true});
  for (size_t group : {size_t{4096}, size_t{65536}, size_t{2} << 20})
    if (layout.pool_bytes() % group == 0) all.push_back({.name = "vattention", .group = group});
  all.push_back({.name = "token_major", .n_layers = 8});
  return all;
}

std::vector<Values> points(const Setting&) { return {{{"phase", "prefill"}}, {{"phase", "decode"}}}; }

Measure open(const Setting& setting) {
  auto team = std::make_shared<ThreadTeam>(std::max(1, int(std::thread::hardware_concurrency())));
  return [=](const Values& point) -> Result<Finding> {
    const bool decode = point["phase"] == "decode";
    const AttentionShape shape = decode         ? setting.tiny ? AttentionShape{2, 1, 256} : AttentionShape{4, 1, 4096}
                                         : setting.tiny ? AttentionShape{1, 64, 256}
                                                : AttentionShape{1, 1024, 1024};
    const std::vector<AttentionMemory> memories = memories_of(shape);
    std::vector<std::unique_ptr<AttentionCase>> cases;
    std::vector<AttentionCase*> pointers;
    for (const AttentionMemory& m : memories) {
      cases.push_back(std::make_unique<AttentionCase>(shape, m, setting.seed));
      pointers.push_back(cases.back().get());
    }
    Finding found;
    const std::vector<Timed> timed = time_attention(pointers, setting.tiny ? 0 : 3, *team, found.wrong);
    for (const auto& c : cases)
      if (c->hash() != cases[0]->hash() && found.wrong.empty())
        found.wrong = "the outputs of two KV memories are not bit-identical";
    if (!found.wrong.empty()) return found;
    for (size_t i = 0; i < timed.size(); ++i) {
      for (size_t part = 0; part < timed[i].means.size(); ++part) {
        const double s = timed[i].means[part];
        found.rows.push_back({{"memory", memories[i].name},
                              {"block", memories[i].block},
                              {"group_kib", memories[i].in_order ? 0 : double(memories[i].group) / 1024},
                              {"variant", default_attention().name},
                              {"sample", part},
                              {"ms", 1e3 * s},
                              {"gbps", 1e-9 * work(cases[i]->args()).bytes / s}});
      }
    }
    return found;
  };
}

REGISTER_EXPERIMENT("paged_attention", "cpu", points, open);

}  // namespace memories

// paged_attention/block_table: the CPU's cost of telling a kernel where KV is, before each decode step (vAttention
// Table 1): a padded table made anew, a table with only its changes written, or one address per sequence (views, as
// here). The step itself is by the cost model, Llama-3-8B on an A800.
//
// Expected: a list of 16K tokens is 4 KB. 64 of them are copied in 9 to 26 us, or .1 to 1 ms from memory; changes and
// views take below 1 us. The step takes 96 ms: below 1 %.
namespace table {

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
  // Ragged sequences whose lists grow like those of a paged memory.
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
  std::vector<size_t> known(lists.size(), 0);  // of the kept table
  std::vector<KvView> views(lists.size());
  const KvLayout layout{{1, 1, 1, Dtype::f32}, KvOrder::layer_major, kBlock, 1 << 20};
  std::byte pool{};
  RealClock clock;
  std::vector<double> us[3];
  const char* const ways[] = {"padded", "diffs", "views"};
  for (int step = 0; step < steps; ++step) {
    for (size_t s = 0; s < lists.size(); ++s)
      if (lengths[s]++ % kBlock == 0) lists[s].push_back(int32_t(random.below(1 << 20)));
    for (int turn = 0; turn < 3; ++turn) {
      const int way = (turn + step) % 3;
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
      } else {
        for (size_t s = 0; s < lists.size(); ++s) views[s] = {&pool, &layout, lists[s].data(), 0};
      }
      if (step > 0) us[way].push_back(1e6 * (clock.now() - start));  // the first step writes all of `kept`
    }
    const size_t widest = padded.size() / lists.size();
    for (size_t s = 0; s < lists.size(); ++s)
      for (size_t b = 0; b < lists[s].size(); ++b)
        if (padded[s * widest + b] != lists[s][b] || kept[s * longest + b] != lists[s][b] ||
            views[s].block_table[b] != lists[s][b])
          return Finding{{}, "the three forms of the block table differ"};
  }
  disagg::Hardware card = disagg::find_hardware("a800x1").value();
  card.mfu = .5, card.mbu = .8, card.step_s = 0;
  model::StepShape decode;
  decode.add_decodes(batch, double(batch) * tokens);
  const double step_us = 1e6 *
                         disagg::step_cost(disagg::find_simulated_model("llama-3-8b").value(), card).seconds(decode);
  Finding found;
  for (int way = 0; way < 3; ++way) {
    std::sort(us[way].begin(), us[way].end());
    const double median = percentile_seen(us[way], 50);
    found.rows.push_back(
        {{"way", ways[way]}, {"us", median}, {"step_us", step_us}, {"share", median / (median + step_us)}});
  }
  return found;
}

REGISTER_EXPERIMENT("paged_attention/block_table", "cpu", points, each<run>);

}  // namespace table

// paged_attention/block_work: the cost of look-ups in the block table. One prefill kernel in f32 over memory in one
// piece, and over blocks in order. It looks up once a block (as our kernels do), once a row, or at every load of 32
// bytes, as a thread of a card does. All give the same bits.
//
// Expected: a row takes 300 cycles, a look-up 10 to 20: once a block 1.00, once a row 1.05 to 1.1, at every load (32 of
// a row, half hidden) 1.3 to 1.8.
namespace work_of_blocks {

constexpr int kDim = 128, kTile = 8, kKeys = 16;  // kKeys: keys whose scores are kept at a time

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int kVectors = kDim / 8;

struct Memory {
  const float* rows;  // [blocks, K and V, block_tokens, kDim]
  const int32_t* table;
  const int* block_tokens;
};

enum class Way { plain, block, row, vector };

inline __attribute__((always_inline)) const float* row_at(const Memory& m, int tokens_of_block, int which, int token) {
  const int block = token / tokens_of_block, at = token - block * tokens_of_block;
  return m.rows + ((int64_t{m.table[block]} * 2 + which) * tokens_of_block + at) * kDim;
}

// A token's row, read vector by vector.
template <Way way>
struct Row {
  const Memory& m;
  const int* block_tokens;
  const float* piece;  // plain, block: the first of these keys' tokens; row: the token itself
  int which, token, in_piece;

  inline __attribute__((always_inline)) Lanes operator[](int i) const {
    if constexpr (way == Way::vector) {
      int size = *block_tokens;
      asm volatile("" : "+r"(size));  // keeps the compiler from reusing an earlier look-up, as another thread could not
      return *reinterpret_cast<const Lanes*>(row_at(m, size, which, token) + 8 * i);
    }
    return *reinterpret_cast<const Lanes*>(piece + (way == Way::row ? 0 : in_piece * kDim) + 8 * i);
  }
};

template <Way way>
__attribute__((noinline)) void attend(const Memory& m, const float* q, int n_keys, float* out) {
  const int size = *m.block_tokens;
  float scores[kTile][kKeys], most[kTile], sum[kTile];
  std::fill_n(most, kTile, -INFINITY);
  std::fill_n(sum, kTile, 0.f);
  std::memset(out, 0, sizeof(float) * kTile * kDim);
  for (int first = 0; first < n_keys; first += kKeys) {
    const float* pieces[2];  // plain, block: K and V of these keys
    for (int which = 0; which < 2; ++which)
      pieces[which] = way == Way::plain
                          ? m.rows + (int64_t{first / size} * 2 + which) * size * kDim + first % size * kDim
                          : row_at(m, size, which, first);
    const auto row = [&](int which, int key) __attribute__((always_inline)) {
      const float* piece = pieces[which];
      if constexpr (way == Way::row) {
        int now = size;
        asm volatile("" : "+r"(now));
        piece = row_at(m, now, which, first + key);
      }
      return Row<way>{m, m.block_tokens, piece, which, first + key, key};
    };
    for (int key = 0; key < kKeys; ++key) {
      const auto k = row(0, key);
      Lanes dots[kTile] = {};
      for (int i = 0; i < kVectors; ++i) {
        const Lanes x = k[i];
#pragma GCC unroll 8
        for (int t = 0; t < kTile; ++t) dots[t] += x * *reinterpret_cast<const Lanes*>(q + t * kDim + 8 * i);
      }
      for (int t = 0; t < kTile; ++t)
        scores[t][key] = ((dots[t][0] + dots[t][4]) + (dots[t][1] + dots[t][5])) +
                         ((dots[t][2] + dots[t][6]) + (dots[t][3] + dots[t][7]));
    }
    for (int t = 0; t < kTile; ++t) {
      const float now = std::max(most[t], *std::max_element(scores[t], scores[t] + kKeys));
      const float keep = std::exp(most[t] - now);
      most[t] = now, sum[t] *= keep;
      for (float& score : scores[t]) score = std::exp(score - now), sum[t] += score;
      for (int d = 0; d < kDim; ++d) out[t * kDim + d] *= keep;
    }
    for (int key = 0; key < kKeys; ++key) {
      const auto v = row(1, key);
      for (int i = 0; i < kVectors; ++i) {
        const Lanes x = v[i];
#pragma GCC unroll 8
        for (int t = 0; t < kTile; ++t) *reinterpret_cast<Lanes*>(out + t * kDim + 8 * i) += scores[t][key] * x;
      }
    }
  }
  for (int t = 0; t < kTile; ++t)
    for (int d = 0; d < kDim; ++d) out[t * kDim + d] /= sum[t];
}

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif

struct Kernel {
  const char* name;
  void (*run)(const Memory&, const float*, int, float*);
};
constexpr Kernel kKernels[] = {{"plain", attend<Way::plain>},
                               {"block", attend<Way::block>},
                               {"row", attend<Way::row>},
                               {"vector", attend<Way::vector>}};

struct alignas(64) CacheLine {
  float at[16];
  bool operator==(const CacheLine&) const = default;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int block : setting.tiny ? std::vector{16} : std::vector{16, 256}) all.push_back({{"block_tokens", block}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
#if defined(__x86_64__)
  if (!cpu_has(Isa::avx2)) return Error{ErrorCode::unavailable, "block_work: expected a CPU with AVX2"};
#endif
  const int block_tokens = point["block_tokens"];
  const int n_keys = setting.tiny ? 256 : 4096, tiles = setting.tiny ? 1 : 4, rounds = setting.tiny ? 41 : 81;
  Random random(setting.seed + 1);
  const auto draw = [&](size_t n) {
    std::vector<CacheLine> x(n / 16);
    for (size_t i = 0; i < n; ++i) x[i / 16].at[i % 16] = float(random.uniform() - .5);
    return x;
  };
  const std::vector<CacheLine> q = draw(size_t(tiles) * kTile * kDim), rows = draw(size_t(n_keys) * 2 * kDim);
  std::vector<int32_t> table(size_t(n_keys / block_tokens));
  std::iota(table.begin(), table.end(), 0);
  const Memory memory{rows[0].at, table.data(), &block_tokens};

  RealClock clock;
  std::vector<double> ms[std::size(kKernels)];
  std::vector<CacheLine> outs[std::size(kKernels)];
  for (auto& out : outs) out.resize(q.size());
  for (int round = 0; round < rounds; ++round)
    for (size_t turn = 0; turn < std::size(kKernels); ++turn) {
      const size_t k = (turn + size_t(round)) % std::size(kKernels);
      const double start = clock.now();
      for (int t = 0; t < tiles; ++t)
        kKernels[k].run(memory, q[size_t(t * kTile * kDim / 16)].at, n_keys, outs[k][size_t(t * kTile * kDim / 16)].at);
      ms[k].push_back(1e3 * (clock.now() - start));
    }
  Finding found;
  double plain = 0;
  for (size_t k = 0; k < std::size(kKernels); ++k) {
    if (outs[k] != outs[0])
      return Finding{{}, std::string(kKernels[k].name) + ": the output is not bit-identical to that of plain"};
    std::ranges::sort(ms[k]);
    const double quickest = ms[k].front();  // the minimum, because other programs use the machine, too
    if (k == 0) plain = quickest;
    found.rows.push_back({{"asks", kKernels[k].name}, {"ms", quickest}, {"times_plain", quickest / plain}});
  }
  return found;
}

REGISTER_EXPERIMENT("paged_attention/block_work", "cpu", points, each<run>);

}  // namespace work_of_blocks

// paged_attention/block_size: whether attention over larger blocks, or over more bytes, costs more. vAttention's Fig. 3
// keeps the number of blocks, so the pool grows with the block (`blocks`). The other parts keep the bytes, larger
// (`bytes`) or smaller (`cached`) than the caches.
//
// Expected: 128 blocks of 8 KiB a token are 4 MiB at 4 tokens and 256 MiB at 256: 1.2 to 2.5 times slower. With equal
// bytes nothing changes, except for blocks of 1 to 4.
namespace size {

struct Sizes {
  AttentionShape shape;
  int n_blocks;
  size_t bytes, cached;
  std::vector<int> blocks;
};
Sizes sizes_of(bool tiny) {
  const AttentionShape shape{tiny ? 2 : 4, 1, tiny ? 256 : 4096, 8, 8, 128, Dtype::f32};
  if (tiny) return {shape, 4, 1 << 20, 1 << 19, {16, 64}};
  return {shape, 128, size_t{128} << 20, size_t{4} << 20, {1, 4, 16, 128, 256}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int block : sizes_of(setting.tiny).blocks) all.push_back({{"block", block}});
  return all;
}

Measure open(const Setting& setting) {
  auto team = std::make_shared<ThreadTeam>(std::max(1, int(std::thread::hardware_concurrency())));
  return [=](const Values& point) -> Result<Finding> {
    const Sizes sizes = sizes_of(setting.tiny);
    const int block = point["block"];
    const size_t block_bytes =
        size_t(block) * KvShape{1, sizes.shape.n_kv_heads, sizes.shape.head_dim, sizes.shape.dtype}.token_bytes();
    const std::vector<AttentionMemory> memories = {{"blocks", block, sizes.n_blocks},
                                                   {"bytes", block, int(sizes.bytes / block_bytes)},
                                                   {"cached", block, int(sizes.cached / block_bytes)}};
    std::vector<std::unique_ptr<AttentionCase>> cases;
    std::vector<AttentionCase*> pointers;
    for (const AttentionMemory& m : memories) {
      cases.push_back(std::make_unique<AttentionCase>(sizes.shape, m, setting.seed));
      pointers.push_back(cases.back().get());
    }
    Finding found;
    const std::vector<Timed> timed = time_attention(pointers, setting.tiny ? 0 : 1.5, *team, found.wrong);
    for (size_t i = 0; i < timed.size(); ++i)
      for (size_t part = 0; part < timed[i].means.size(); ++part) {
        const double s = timed[i].means[part];
        found.rows.push_back({{"held", memories[i].name},
                              {"n_blocks", memories[i].n_blocks},
                              {"pool_mib", double(cases[i]->pool_bytes()) / (1 << 20)},
                              {"sample", part},
                              {"ms", 1e3 * s},
                              {"gbps", 1e-9 * work(cases[i]->args()).bytes / s}});
      }
    return found;
  };
}

REGISTER_EXPERIMENT("paged_attention/block_size", "cpu", points, open);

}  // namespace size

// paged_attention/block_latency: latency per output token by block size (PagedAttention Fig. 18b). OPT-13B on an A100
// in virtual time, the real engine and memory, a pool of 15,000 tokens.
//
// Expected, ShareGPT: a sequence has 330 tokens and wastes half a block, so blocks of 256 hold .72 of the batch. At 3.3
// requests/s blocks of 16 keep up and blocks of 256 are at the edge: 1 to 5 times the latency; blocks of 128 .95 to
// 1.6. Expected, Alpaca at 60/s: blocks of 256 hold a fifth of the batch: 2 to 12 times; blocks of 32 .95 to 1.2.
namespace latency {

constexpr Rates kRates = {312e12 * 0.5, 1.555e12 * 0.8};
constexpr int kPoolTokens = 15000;

ModelConfig opt_13b() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = 40;
  c.hidden = 5120;
  c.intermediate = 13653;  // a gated MLP with as many parameters as OPT's 20,480
  c.n_heads = c.n_kv_heads = 40;
  c.head_dim = 128;
  c.vocab = 50272;
  c.max_position = 2048;
  return c;
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* dataset : {"sharegpt", "alpaca"})
    for (int block : {1, 4, 16, 32, 128, 256})
      for (int draw = 0; draw < kDraws; ++draw)
        all.push_back({{"dataset", dataset}, {"block", block}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string dataset = point["dataset"];
  const int n = setting.tiny ? 60 : dataset == "alpaca" ? 2000 : 1000;
  const double rate = dataset == "alpaca" ? 60 : 3.3;
  Result<LengthSet> lengths = request_lengths(dataset, n, setting, point["sample"]);
  if (!lengths) return lengths.error();
  KvOptions kv{.shape = kv_shape(shape_of_nothing(), Dtype::bf16),
               .block_tokens = point["block"],
               .max_sequence_tokens = 2048,
               .prefix_cache = false};
  kv.pool_bytes = size_t(kPoolTokens) * kv.shape.token_bytes();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool("paged", kv);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme("paged")->make(pool.value(), kv);
  VirtualClock clock;
  TimedModel model({.config = opt_13b()}, kRates, clock);
  Engine engine(model, *memory, {.policy = find_batch_policy("prefill_first"), .max_batch = 256, .step_tokens = 2048},
                clock, nullptr);
  auto sink = std::make_shared<Tally>();
  sink->end_s.resize(size_t(n));
  Random random(seed_of(setting, point["sample"]));
  std::vector<double> arrivals;
  double due = 0;
  int64_t expected = 0;
  for (size_t i = 0; i < size_t(n) || !engine.idle();) {
    for (; i < size_t(n) && due <= clock.seconds; ++i, due += random.exponential() / rate) {
      const Lengths& wanted = lengths.value().requests[i];
      auto request = std::make_shared<Request>();
      request->id = i;
      request->prompt.assign(size_t(wanted.prompt), 1);
      request->sampling.temperature = 0;
      request->max_tokens = wanted.output;
      request->ignore_eos = true;
      request->arrival_s = due;
      arrivals.push_back(due);
      expected += wanted.output;
      engine.submit(make_sequence(request, {}, sink, std::make_shared<std::atomic<bool>>(false), nullptr));
    }
    if (engine.step()) continue;
    if (i == size_t(n)) return Finding{{}, "the engine makes no progress"};
    clock.seconds = due;
  }
  memory->check_invariants();
  if (sink->tokens != expected || sink->ended != n) return Finding{{}, "some requests did not get all their tokens"};
  double normalised = 0;
  for (size_t i = 0; i < size_t(n); ++i)
    normalised += (sink->end_s[i] - arrivals[i]) / lengths.value().requests[i].output / n;
  return Finding{{{{"requests_per_s_offered", rate},
                   {"latency_per_token_s", normalised},
                   {"batch_mean", model.sequences / model.steps},
                   {"preemptions", engine.stats().preemptions},
                   {"lengths", lengths.value().source}}},
                 ""};
}

REGISTER_EXPERIMENT("paged_attention/block_latency", "cpu", points, each<run>);

}  // namespace latency

// paged_attention/block_speed: requests per second of llama-mini by block size, with room for all in the pool (wde's
// block sizes). The two sizes take turns, step by step. prompts: 512 tokens in chunks of 128. decode: 8 sequences of
// 1,024 tokens generate 16 each.
//
// Expected: a kernel with one look-up per block differs by 0 to 3 % between 16 and 128, and hashing a token takes
// nanoseconds of 360 us: .97 to 1.03. Decode came out higher: a block of 16 is 8 KiB in one piece here, and the
// prefetcher restarts after it.
namespace speed {

constexpr int kChunk = 128, kBlocks[] = {16, 128};

struct Sizes {
  const char* model;
  int tokens, context, batch, decoded, rounds;
};
constexpr Sizes sizes_of(bool tiny) {
  return tiny ? Sizes{"llama-tiny", 192, 128, 2, 4, 1} : Sizes{"llama-mini", 512, 1024, 8, 16, 6};
}

using Contestants = std::vector<std::unique_ptr<Contestant>>;

class Room {
 public:
  explicit Room(const Setting& setting)
      : setting_(setting),
        sizes_(sizes_of(setting.tiny)),
        team_(std::max(1, int(std::thread::hardware_concurrency()))) {}

  Result<Finding> run(const Values& point) {
    if (!model_)
      if (Status status = load(); !status) return status.error();
    Result<Contestants> made = contestants();
    if (!made) return made.error();
    Finding found;
    for (int round = 0; round < sizes_.rounds && found.wrong.empty(); ++round)
      if (Status status = run_round(made.value(), point["load"], round, found); !status) return status.error();
    return found;
  }

 private:
  Status load() {
    const std::string dir = std::string("experiments/models/") + sizes_.model;
    Result<ModelConfig> config = load_model_config(dir);
    if (!config) return config.error();
    auto weights = load_weights(dir, config.value(), {.dummy = true}, team_);
    if (!weights) return weights.error();
    model_ = make_llama(weights.value(), team_, kChunk, sizes_.batch, {});
    // Any numbers serve as the KV of a sequence, because no result here depends on them.
    layout_ = {kv_shape(config.value(), Dtype::f32), KvOrder::layer_major, sizes_.context, 1};
    source_ = Buffer(layout_.pool_bytes());
    Random random(setting_.seed + 7);
    float* numbers = reinterpret_cast<float*>(source_.data());
    for (size_t i = 0; i < layout_.pool_bytes() / sizeof(float); ++i) numbers[i] = float(random.uniform() - .5);
    return ok();
  }

  std::vector<int32_t> tokens(int n, uint64_t number) const {
    Random random(setting_.seed * 1000 + number);
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int32_t& id : ids) id = int32_t(random.below(uint64_t(model_->config().vocab)));
    return ids;
  }

  Result<Contestants> contestants() {
    Contestants all;
    for (int block : kBlocks) {
      KvOptions kv{.shape = kv_shape(model_->config(), Dtype::f32),
                   .block_tokens = block,
                   .max_sequence_tokens = model_->config().max_position};
      kv.pool_bytes = size_t(2 * sizes_.batch) * size_t(sizes_.context + 2 * 128) * kv.shape.token_bytes();
      auto made = Contestant::create(
          "paged", *model_, kv,
          {.policy = find_batch_policy("chunked"), .max_batch = sizes_.batch, .step_tokens = kChunk});
      if (!made) return made.error();
      made.value()->name = "blocks of " + std::to_string(block);
      touch(made.value()->memory(), block);
      all.push_back(std::move(made).value());
    }
    return all;
  }

  // Touches all of the pool, so that no step waits for new pages, of which many small blocks touch more.
  static void touch(KvMemory& memory, int block) {
    const std::vector<int32_t> ids(static_cast<size_t>(block));
    std::vector<KvHandle> handles;
    for (;;) {
      Result<KvReservation> reserved = memory.reserve(ids, 0);
      if (!reserved) break;
      handles.push_back(reserved.value().handle);
      if (!memory.append(handles.back(), block)) break;
      const KvView view = memory.view(handles.back());
      const KvShape& shape = view.layout->shape;
      for (int layer = 0; layer < shape.n_layers; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int t = 0; t < block; ++t)
            for (int h = 0; h < shape.n_kv_heads; ++h) std::memset(view.row(layer, kv, t, h), 0, shape.row_bytes());
    }
    for (KvHandle handle : handles) memory.free(handle);
  }

  // Steps all contestants in turn until they are idle. Adds up each one's seconds and keeps its greatest use of the
  // pool.
  static void finish(Contestants& all, std::vector<double>& seconds, std::vector<double>& used, int round) {
    for (size_t first = size_t(round);; ++first) {  // rotates who is first
      bool some = false;
      for (size_t n = 0; n < all.size(); ++n) {
        const size_t i = (first + n) % all.size();
        if (all[i]->engine().idle()) continue;
        some = true;
        seconds[i] += all[i]->step();
        const KvStats kv = all[i]->memory().stats();
        used[i] = std::max(used[i], double(kv.active) / kv.capacity);
      }
      if (!some) return;
    }
  }

  Status run_round(Contestants& all, const std::string& load, int round, Finding& found) {
    for (auto& c : all) {
      c->memory().clear_prefix_cache();
      c->scramble(setting_.seed + uint64_t(round));
    }
    std::vector<double> seconds(all.size(), 0), used(all.size(), 0), untimed = seconds;
    const uint64_t number = 100 * uint64_t(round + 1);
    const int requests = load == "decode" ? sizes_.batch : 1;
    for (auto& c : all) c->submit(tokens(40, number + 1), 1);  // warm-up
    finish(all, untimed, used, round);
    const KvView source{source_.data(), &layout_, nullptr, 0};
    for (auto& c : all)
      for (int i = 0; i < requests; ++i) {
        std::vector<int32_t> prompt = tokens(load == "decode" ? sizes_.context : sizes_.tokens,
                                             number + 10 + uint64_t(i));
        if (load != "decode")
          c->submit(std::move(prompt), 1);
        else if (!c->adopt(std::move(prompt), sizes_.decoded, source))
          return invalid(c->name + " has no free memory for a prompt");
      }
    finish(all, seconds, used, round);
    if (found.wrong = compare(all); !found.wrong.empty()) return ok();
    for (size_t i = 0; i < all.size(); ++i) {
      all[i]->memory().check_invariants();
      if (used[i] > .5) found.wrong = all[i]->name + ": more than half of the pool is in use";
      found.rows.push_back({{"block", kBlocks[i]},
                            {"sample", round},
                            {"requests_per_s", requests / seconds[i]},
                            {"pool_used", used[i]}});
    }
    return ok();
  }

  const Setting setting_;
  const Sizes sizes_;
  ThreadTeam team_;
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer source_;  // KV of one sequence
};

std::vector<Values> points(const Setting&) { return {{{"load", "prompts"}}, {{"load", "decode"}}}; }

Measure open(const Setting& setting) {
  auto room = std::make_shared<Room>(setting);
  return [room](const Values& point) { return room->run(point); };
}

REGISTER_EXPERIMENT("paged_attention/block_speed", "cpu", points, open);

}  // namespace speed

// paged_attention/instructions: instructions of the default kernel by valgrind's callgrind, one process per point,
// between the program's start and stop requests. decode: one sequence of 1,024 tokens. prefill: 256 tokens.
//
// Expected: some 60 instructions load, convert and multiply a row for a head; a table adds 1 to 10: 1.0 to 1.1 in
// decode. In prefill a row serves many queries: 1 to 1.05. vAttention counts 7 to 13 % more in other kernels (Fig. 2).
namespace counted {

// Valgrind's client request (its manual, section 3.1), written out because its header may be missing: code without
// effect that valgrind recognises as a request. Without valgrind it does nothing.
void count_instructions(bool on) {
#ifdef __x86_64__
  uint64_t request[6] = {on ? 0x43540004u : 0x43540005u};  // callgrind: start or stop instrumentation
  uint64_t result = 0;
  asm volatile("rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi; xchgq %%rbx, %%rbx"
               : "=d"(result)
               : "a"(&request[0]), "0"(result)
               : "cc", "memory");
#else
  (void)on;
#endif
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* phase : {"decode", "prefill"})
    for (const char* memory : {"contiguous", "blocks of 16"}) all.push_back({{"phase", phase}, {"memory", memory}});
  return all;
}

Result<Finding> attend(const Values& point, const Setting& setting) {
  const bool decode = point["phase"] == "decode";
  AttentionMemory memory{point["memory"]};
  if (memory.name == "blocks of 16") memory.block = 16;
  AttentionCase problem(
      decode ? AttentionShape{1, 1, setting.tiny ? 256 : 1024} : AttentionShape{1, setting.tiny ? 64 : 256, 256},
      memory, setting.seed);
  ThreadTeam team(1);
  default_attention().run(problem.args(), team);
  count_instructions(true);
  default_attention().run(problem.args(), team);
  count_instructions(false);
  return Finding{{{{"variant", default_attention().name}}}, problem.check()};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return attend(point, setting); };
}

REGISTER_EXPERIMENT("paged_attention/instructions", "cpu", points, open);

}  // namespace counted

}  // namespace
}  // namespace xpyd::experiments::paged_attention_experiment
