// The prefix cache with 1 M indexed blocks, the memory's part of a decode step, and copies of blocks beside the
// streaming copy.
//
// Expected: a prompt of 4096 tokens has 256 blocks of 16. Hashing them takes 256 * (XXH3 of 64 B and 16 B), about 3 us.
// The table (16 MiB), the tokens (64 MiB), and block states and identities (16 MiB each) exceed the caches, so a
// look-up misses in four places per block. 1024 misses of about 100 ns, ten at a time, are 10 us. The target of 20 M
// blocks/s allows 12.8 us.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/pool/block_pool.h"
#include "base/copy.h"
#include "base/random.h"
#include "experiments/bench/harness.h"

namespace xpyd::experiments {
namespace {

constexpr int kBlockTokens = 16, kPromptBlocks = 256, kPrompts = 4096;
constexpr int kPromptTokens = kPromptBlocks * kBlockTokens + 1;  // a hit always leaves the last token

// 4096 prompts without common prefixes, all cached: 1,048,576 blocks.
struct FullCache {
  explicit FullCache(bool radix) : tokens(size_t(kPrompts) * kPromptTokens) {
    KvOptions o;
    o.shape = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 1, .dtype = Dtype::bf16};
    o.block_tokens = kBlockTokens;
    o.radix = radix;
    // In a radix tree the last token of each prompt has a block, too.
    o.pool_bytes = size_t(radix ? kPrompts : 0) * kBlockTokens * o.shape.token_bytes() +
                   (size_t(kPrompts) * kPromptBlocks + 1) * kBlockTokens * o.shape.token_bytes();
    pool = std::dynamic_pointer_cast<BlockPool>(make_block_pool("paged", o).value());
    kv = find_kv_scheme("paged")->make(pool, o);
    Random random(1);
    for (int32_t& t : tokens) t = int32_t(random.below(128'000));
    // Prompts in random order, so that neighbours in the table are not neighbours in a prompt.
    order.resize(kPrompts);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (int p = 0; p < kPrompts; ++p) {
      const KvReservation r = kv->reserve(prompt(p), 0).value();  // a tree has some first tokens already
      const std::span<const int32_t> rest = prompt(p).subspan(size_t(r.cached_tokens));
      XPYD_CHECK(kv->append(r.handle, int(rest.size())));
      kv->commit(r.handle, rest);
      kv->free(r.handle);
    }
  }
  std::span<const int32_t> prompt(int p) const {
    return std::span<const int32_t>(tokens).subspan(size_t(p) * kPromptTokens, kPromptTokens);
  }
  bool radix() const { return dynamic_cast<const RadixTree*>(pool->index()); }
  std::span<const int32_t> next() { return prompt(order[turn++ % kPrompts]); }

  std::vector<int32_t> tokens;
  std::vector<int> order;
  size_t turn = 0;
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<KvMemory> kv;
};

const PrefixIndex& hashes(const FullCache& cache) { return dynamic_cast<const PrefixIndex&>(*cache.pool->index()); }

// The minimum of any look-up: the hashes, and one slot per key.
int bare_probe(const PrefixIndex& index, std::span<const int32_t> tokens, int32_t* blocks) {
  uint64_t hashes[PrefixIndex::kBatch], before = 0;
  for (int at = 0; at < kPromptBlocks; at += PrefixIndex::kBatch) {
    index.hash_batch(before, at == 0, tokens.data() + at * kBlockTokens, PrefixIndex::kBatch, hashes);
    for (int i = 0; i < PrefixIndex::kBatch; ++i) blocks[at + i] = index.slot_block(hashes[i]);
    before = hashes[PrefixIndex::kBatch - 1];
  }
  return kPromptBlocks;
}

std::string check_cache(FullCache& cache) {
  for (int p = 0; p < kPrompts; p += 37) {
    if (cache.kv->probe(cache.prompt(p), 0) != kPromptTokens - 1) return "probe() misses a cached prompt";
    KvReservation r = cache.kv->reserve(cache.prompt(p), 0).value();
    bool equal = cache.kv->blocks(r.handle).size() == kPromptBlocks;
    const int32_t* wanted = cache.prompt(p).data();
    for (int32_t block : cache.kv->blocks(r.handle)) {
      equal = equal && (cache.radix() || std::equal(wanted, wanted + kBlockTokens, hashes(cache).tokens_of(block)));
      wanted += kBlockTokens;
    }
    cache.kv->free(r.handle);
    if (r.cached_tokens != kPromptTokens - 1 || !equal) return "reserve() returned wrong blocks or lengths";
  }
  cache.kv->check_invariants();
  return "";
}

void bench_prefix(Bench& bench) {
  FullCache cache(false), tree(true);
  auto check = [&] { return check_cache(cache); };
  auto check_tree = [&] { return check_cache(tree); };
  volatile int sink = 0;
  int32_t blocks[kPromptBlocks];
  const char *bare = "bare table probe, 256 of 1 M blocks", *probe = "probe() of a hit: tokens compared";
  std::vector<BenchCase> cases{
      {.name = bare,
       .run = [&] { sink = bare_probe(hashes(cache), cache.next(), blocks); },
       .check = check,
       .limit = Limit::none},
      {.name = probe,
       .run = [&] { sink = cache.kv->probe(cache.next(), 0); },
       .check = check,
       .limit = Limit::none,
       .versus = {bare}},
      {.name = "reserve() + free(): references and LRU too",
       .run =
           [&] {
             KvReservation r = cache.kv->reserve(cache.next(), 0).value();
             cache.kv->free(r.handle);
           },
       .check = check,
       .limit = Limit::none,
       .target = 0.5,
       .versus = {bare}},
      {.name = "probe() of a hit by a radix tree",
       .run = [&] { sink = tree.kv->probe(tree.next(), 0); },
       .check = check_tree,
       .limit = Limit::none,
       .versus = {probe}},
      {.name = "reserve() + free() by a radix tree",
       .run =
           [&] {
             KvReservation r = tree.kv->reserve(tree.next(), 0).value();
             tree.kv->free(r.handle);
           },
       .check = check_tree,
       .limit = Limit::none,
       .versus = {probe}},
  };
  size_t first = bench.rows().size();
  bench.measure(cases);
  if (bench.rows().size() == first) return;  // a wrong result is not timed
  const double seconds = bench.rows()[first + 2].seconds, millions = kPromptBlocks / seconds * 1e-6;
  bench.report({.name = "look-ups with references and LRU",
                .n_threads = 1,
                .seconds = seconds,
                .measure = "x 20 M blocks/s",
                .share = millions / 20,
                .share_p10 = millions / 20,
                .share_p90 = millions / 20,
                .target = 1});
}

// The memory's part of one decode step of 64 sequences: append a token to each, and commit it.
void measure_step(Bench& bench, bool radix, const char* name) {
  constexpr int kSequences = 64, kLongest = 1024;
  KvOptions o;
  o.shape = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 4, .dtype = Dtype::bf16};
  o.pool_bytes = size_t(kSequences) * kLongest * 2 * o.shape.token_bytes();
  o.radix = radix;
  auto pool = make_block_pool("paged", o).value();
  auto kv = find_kv_scheme("paged")->make(pool, o);
  std::vector<KvHandle> handles(kSequences, kNoKv);
  Random random(2);
  int length = kLongest;
  auto step = [&] {
    if (length == kLongest) {
      for (KvHandle& h : handles) {
        if (h != kNoKv) kv->free(h);
        int32_t first = int32_t(random.below(1 << 30));
        h = kv->reserve({&first, 1}, random.next()).value().handle;
      }
      length = 0;
    }
    for (KvHandle h : handles) {
      int32_t token = length;
      XPYD_CHECK(!kv->tail_shared(h) && kv->append(h, 1));
      kv->commit(h, {&token, 1});
    }
    ++length;
  };
  bench.measure({{.name = name,
                  .run = step,
                  .check =
                      [&] {
                        for (int i = 0; i < 2 * kLongest; ++i) step();
                        kv->check_invariants();
                        bool right = kv->written_tokens(handles[5]) == length;
                        return std::string(right ? "" : "tokens are missing");
                      },
                  .limit = Limit::none}});
}

void bench_step(Bench& bench) {
  measure_step(bench, false, "64 sequences: append + written, 1 token each");
  measure_step(bench, true, "… each token found in a radix tree at once");
}

// Copies blocks in random order into one buffer, as a transfer between two pools does.
void bench_copy(Bench& bench) {
  constexpr size_t kPool = size_t(512) << 20, kBatch = size_t(64) << 20;
  Buffer src(kPool), dst(kPool);
  Random random(3);
  for (size_t i = 0; i < kPool / 8; ++i) src.as<uint64_t>()[i] = random.next();
  std::vector<BenchCase> cases;
  struct Gather {
    std::vector<Copy> pieces;
    size_t turn = 0, per_run = 0;
    std::span<const Copy> next() {
      size_t begin = turn % (pieces.size() / per_run) * per_run;
      ++turn;
      return std::span<const Copy>(pieces).subspan(begin, per_run);
    }
  };
  std::vector<std::unique_ptr<Gather>> gathers;
  auto add = [&](size_t piece, size_t footprint, const std::string& where) {
    auto g = std::make_unique<Gather>();
    std::vector<size_t> from(footprint / piece);
    std::iota(from.begin(), from.end(), size_t{0});
    for (size_t i = from.size(); i > 1; --i) std::swap(from[i - 1], from[random.below(i)]);
    for (size_t i = 0; i < from.size(); ++i)
      g->pieces.push_back({src.data() + from[i] * piece, dst.data() + i * piece, piece});
    g->per_run = std::min(kBatch, footprint) / piece;
    std::string size = std::to_string(piece >> 10) + " KiB pieces" + where;
    auto plain = [](std::span<const Copy> pieces) {
      for (const Copy& p : pieces) std::memcpy(p.destination, p.source, p.bytes);
    };
    auto check = [gather = g.get()](auto copy) {
      return [gather, copy]() -> std::string {
        std::span<const Copy> pieces = gather->pieces;
        for (const Copy& p : pieces) std::memset(p.destination, 0, p.bytes);
        copy(pieces);
        for (const Copy& p : pieces)
          if (std::memcmp(p.destination, p.source, p.bytes) != 0) return "the copied bytes differ from the source";
        return "";
      };
    };
    Work work{.bytes = double(g->per_run * piece)};
    cases.push_back({.name = "memcpy, " + size,
                     .run = [gather = g.get(), plain] { plain(gather->next()); },
                     .check = check(plain),
                     .work = work,
                     .limit = Limit::copy});
    cases.push_back({.name = "streaming, " + size,
                     .run = [gather = g.get()] { copy_streaming(gather->next()); },
                     .check = check(copy_streaming),
                     .work = work,
                     .limit = Limit::copy,
                     .target = where.empty() && piece >= 65536 ? 1.3 : 0,
                     .versus = {cases.back().name}});
    gathers.push_back(std::move(g));
  };
  for (size_t piece : {4096, 16384, 65536, 262144}) add(piece, kPool, "");
  for (size_t piece : {4096, 65536}) add(piece, size_t(256) << 10, " in cache");
  bench.measure(cases);
}

REGISTER_BENCH("prefix", bench_prefix);
REGISTER_BENCH("kv_step", bench_step);
REGISTER_BENCH("kv_copy", bench_copy);

}  // namespace
}  // namespace xpyd::experiments
