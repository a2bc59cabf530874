// The central test of the project: one logits hash for each dtype of KV and weights, whatever manages memory,
// schedules, splits, transfers, chunks, drafts and keeps KV. One table lists the switches, and every three of their
// values meet in some run.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "base/random.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::parity_test {

struct Memory {
  const char* scheme;
  int block_tokens;
  KvShare share = KvShare::off;
  bool radix = false;
  bool reuses = false;  // reuses 40 common tokens
};
constexpr Memory memories[] = {{"contiguous", 16},
                               {"paged", 1, KvShare::off, false, true},
                               {"paged", 16, KvShare::off, false, true},
                               {"paged", 64},
                               {"paged", 3, KvShare::off, true, true},
                               {"slots", 16, KvShare::off, false, true},
                               {"vattention", 64},
                               {"vattention", 64, KvShare::alias, false, true},
                               {"vattention", 64, KvShare::takeover, false, true},
                               {"vattention", 64, KvShare::copy, false, true}};
constexpr std::pair<const char*, int> batchings[] = {
    {"static", 2048}, {"prefill_first", 2048}, {"persistent", 64}, {"chunked", 7}, {"chunked", 64}};
constexpr const char* topologies[] = {"1C", "1P1D", "2P2D", "2C1P1D"};
constexpr const char* transports[] = {"local", "handoff", "shm", "tcp"};
constexpr std::pair<int, int> shapes[] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {2, 4}};  // tensor ranks, stages
constexpr const char* cuts[] = {"fixed", "equal_time"};
constexpr const char* drafts[] = {"off", "ngram", "mtp"};
constexpr Dtype weights[] = {Dtype::f32, Dtype::f16, Dtype::int8, Dtype::int4, Dtype::fp8};
constexpr const char* families[] = {"llama", "mixtral", "qwen3_moe"};
constexpr int windows[] = {0, 1, 1 << 10};  // waves under way: as many as stages; one; all

enum Switch {
  kTopology,
  kMemory,
  kOrder,
  kBatching,
  kTransport,
  kGrain,
  kPrefix,
  kThreads,
  kDtype,
  kPrefill,
  kDecode,
  kWindow,
  kCut,
  kDisagg,
  kDraft,
  kHost,
  kWeights,
  kExact,
  kScarce,
  kReservation,
  kBatch,
  kFamily,
  kWholeExperts,
  kSwitches
};
constexpr int kValues[kSwitches] = {std::size(topologies),
                                    std::size(memories),
                                    2,
                                    std::size(batchings),
                                    std::size(transports),
                                    3,
                                    2,
                                    2,
                                    std::size(kKvDtypes),
                                    std::size(shapes),
                                    std::size(shapes),
                                    std::size(windows),
                                    std::size(cuts),
                                    4,  // push, pull, decode_first, push with two copies
                                    std::size(drafts),
                                    2,
                                    std::size(weights),
                                    2,
                                    2,
                                    2,
                                    2,
                                    std::size(families),
                                    4};
using Row = std::array<int, kSwitches>;  // -1: not chosen yet

// Returns false if two or three of the chosen values cannot be combined, or if one has no effect beside another.
bool legal(const Row& r) {
  const auto is = [&](Switch s, int value) { return r[s] == value; };
  const auto not_plain = [&](Switch s) { return r[s] > 0; };
  const auto flat = [&](Switch s) { return r[s] >= 0 && shapes[r[s]].second == 1; };  // one stage
  const bool one = is(kTopology, 0), waves = not_plain(kWindow);
  const bool ranks = not_plain(kPrefill) || not_plain(kDecode) || waves || not_plain(kWholeExperts);
  if (one && (not_plain(kTransport) || not_plain(kGrain) || not_plain(kDecode) || not_plain(kDisagg) ||
              not_plain(kReservation)))
    return false;
  if (is(kExact, 1) && is(kWeights, 0)) return false;
  // A shared pool needs instances of one shape, and KV is never pulled.
  const bool shared = is(kTransport, 1);
  if (shared && (is(kDisagg, 1) || (r[kPrefill] >= 0 && r[kDecode] >= 0 && r[kPrefill] != r[kDecode]))) return false;
  if (waves && (one || shared) && (flat(kPrefill) || (shared && flat(kDecode)))) return false;
  if (waves && flat(kPrefill) && flat(kDecode)) return false;
  if (ranks && is(kScarce, 1)) return false;
  const auto many = [&](Switch s) { return r[s] >= 0 && shapes[r[s]].first * shapes[r[s]].second >= 4; };
  // Whole experts of P, D or both: with experts, on several tensor ranks.
  const auto alone = [&](Switch s) { return r[s] >= 0 && shapes[r[s]].first == 1; };
  if (not_plain(kWholeExperts) && is(kFamily, 0)) return false;
  if (r[kWholeExperts] > 0 && r[kWholeExperts] % 2 == 1 && alone(kPrefill)) return false;
  if (r[kWholeExperts] > 1 && (one || alone(kDecode))) return false;
  if (shared && not_plain(kWholeExperts) && (alone(kPrefill) || alone(kDecode))) return false;
  if (waves && is(kWholeExperts, 3) && is(kThreads, 1)) return false;  // P or D has eight ranks
  if (is(kThreads, 1) && (many(kPrefill) || many(kDecode))) return false;  // they would have sixteen threads
  if (is(kDraft, 2) && not_plain(kFamily)) return false;  // the prediction head belongs to the dense model
  // Drafts need one rank, and the prediction head has one dtype.
  if (not_plain(kDraft) && (ranks || (is(kDraft, 2) && (not_plain(kWeights) || not_plain(kExact))))) return false;
  // A copy needs a second D, memory of its own and a prefix cache.
  const bool copies = is(kDisagg, 3);
  if (copies && (shared || is(kPrefix, 0) || (r[kTopology] >= 0 && !is(kTopology, 2)))) return false;
  if (r[kMemory] < 0) return true;
  const Memory& m = memories[r[kMemory]];
  const bool groups = m.scheme[0] == 'v', slots = m.scheme[0] == 'c' || m.scheme[0] == 's';
  if ((m.share != KvShare::off || m.radix) && is(kPrefix, 0)) return false;
  if (copies && (groups || slots)) return false;
  if (shared && (groups || slots)) return false;  // tables of blocks are handed over
  if (groups && is(kTransport, 2)) return false;  // page groups are not in a memory file
  if (m.share == KvShare::takeover && ranks) return false;
  return !(is(kScarce, 1) && (groups || slots));
}

TinySetup setup_of(const Row& r) {
  const Memory& m = memories[r[kMemory]];
  TinySetup s{.topology = topologies[r[kTopology]], .scheme = m.scheme, .batching = batchings[r[kBatching]].first};
  s.transport = transports[r[kTransport]];
  s.block_tokens = m.block_tokens, s.share = m.share, s.radix = m.radix;
  s.order = KvOrder(r[kOrder]);
  s.step_tokens = batchings[r[kBatching]].second;
  s.stream_kv = StreamKv(r[kGrain]);
  s.prefix_cache = r[kPrefix] == 1;
  s.threads = 1 + r[kThreads];
  s.kv_dtype = kKvDtypes[r[kDtype]];
  std::tie(s.prefill_tp, s.prefill_pp) = shapes[r[kPrefill]];
  std::tie(s.decode_tp, s.decode_pp) = shapes[r[kDecode]];
  s.layers = std::max(s.prefill_pp, s.decode_pp) > 2 ? 4 : 2;
  s.window = windows[r[kWindow]];
  s.chunk_policy = cuts[r[kCut]];
  s.disagg = r[kDisagg] == 2 ? "decode_first" : "prefill_first";
  s.disagg_options.pull = r[kDisagg] == 1;
  s.decode_copies = r[kDisagg] == 3 ? 2 : 1;
  if (r[kDraft] > 0) s.speculation = {find_drafter(drafts[r[kDraft]]), 3};
  if (r[kHost]) s.tiers.host_bytes = 1 << 18;
  s.weight_dtype = weights[r[kWeights]];
  s.exact = r[kExact] == 1;
  s.reserve_blocks = r[kReservation] == 1;
  s.max_batch = r[kBatch] ? 3 : 16;
  s.family = families[r[kFamily]];
  s.prefill_whole = r[kWholeExperts] % 2 == 1, s.decode_whole = r[kWholeExperts] / 2 == 1;
  const bool slots = m.scheme[0] == 'c' || m.scheme[0] == 's';
  // With four ranks each of the two heads is stored twice.
  s.pool_bytes = size_t(slots ? 3 : 1) * size_t(s.layers / 2) * (std::max(s.prefill_tp, s.decode_tp) > 2 ? 2 : 1) << 20;
  if (r[kScarce]) {  // 192 tokens for 400
    s.pool_bytes = 192 * kv_shape(tiny_config(s.layers), s.kv_dtype).token_bytes();
    s.pool_bytes *= size_t(m.block_tokens == 64 ? 2 : 1) * size_t(r[kDraft] == 2 ? 2 : 1);
  }
  return s;
}

// The hash of the same prompts on one rank, a step at a time, without a cache.
uint64_t expected(const TinySetup& s) {
  static std::map<std::tuple<std::string, int, Dtype, Dtype, bool>, uint64_t> known;
  const auto [at, is_new] = known.try_emplace({s.family, s.layers, s.kv_dtype, s.weight_dtype, s.exact}, 0);
  if (!is_new) return at->second;
  TinySetup plain{.layers = s.layers, .family = s.family, .scheme = "contiguous", .batching = "static"};
  plain.kv_dtype = s.kv_dtype, plain.weight_dtype = s.weight_dtype, plain.exact = s.exact;
  plain.prefix_cache = false, plain.step_tokens = 2048, plain.pool_bytes = 8 << 20;
  return at->second = run_ragged(plain).hash;
}

RaggedRun check(const Row& row) {
  const TinySetup setup = setup_of(row);
  INFO(setup.describe() << " " << setup.disagg << (setup.disagg_options.pull ? " pull" : "") << " copies "
                        << setup.decode_copies << " weights " << dtype_name(setup.weight_dtype)
                        << (setup.exact ? " exact" : "") << " batch " << setup.max_batch << " pool "
                        << setup.pool_bytes);
  RaggedRun run = run_ragged(setup);
  REQUIRE(run.hash == expected(setup));
  return run;
}

// Fills in the missing values switch by switch in random order, and takes the legal value with the highest `worth`.
// Returns false if there is none.
template <class Worth>
bool fill(Row& row, Random& random, Worth worth) {
  std::array<int, kSwitches> order;
  for (int s = 0; s < kSwitches; ++s) order[size_t(s)] = s;
  for (size_t s = kSwitches; s > 1; --s) std::swap(order[s - 1], order[random.below(s)]);
  for (int s : order) {
    if (row[size_t(s)] >= 0) continue;
    Row best = row;
    int most = -1;
    for (int turn = int(random.below(uint64_t(kValues[s]))), v = 0; v < kValues[s]; ++v) {
      Row next = row;
      next[size_t(s)] = (v + turn) % kValues[s];
      if (!legal(next)) continue;
      if (const int n = worth(next, s); n > most) most = n, best = next;
    }
    if (most < 0) return false;
    row = best;
  }
  return true;
}

// Returns rows in which every legal triple of values occurs. Each row begins with a triple that has not occurred, and
// takes the values that add most.
std::vector<Row> rows_of_triples() {
  std::array<int, kSwitches + 1> first = {};  // index of a switch's first value among those of all
  for (int s = 0; s < kSwitches; ++s) first[size_t(s) + 1] = first[size_t(s)] + kValues[s];
  const int n = first[kSwitches];
  std::vector<bool> met(size_t(n * n * n));
  const auto place = [&](const Row& row, int a, int b, int c) {
    const auto id = [&](int s) { return first[size_t(s)] + row[size_t(s)]; };
    return size_t((id(a) * n + id(b)) * n + id(c));
  };
  Random random(1);
  std::vector<Row> rows;
  const auto fresh = [&](const Row& row,
                         int with) {  // counts new triples, of switch `with` or (below 0) of all
    int n_fresh = 0;
    for (int a = 0; a < kSwitches; ++a)
      for (int b = a + 1; b < kSwitches && row[size_t(a)] >= 0; ++b)
        for (int c = b + 1; c < kSwitches && row[size_t(b)] >= 0; ++c)
          if ((with < 0 || a == with || b == with || c == with) && row[size_t(c)] >= 0)
            n_fresh += !met[place(row, a, b, c)];
    return n_fresh;
  };
  const auto meet = [&](const Row& begun) {
    Row best;
    int most = 0;
    for (int tries = 0; tries < 10; ++tries) {
      Row row = begun;
      if (!fill(row, random, fresh)) continue;
      if (const int n_fresh = fresh(row, -1); n_fresh > most) most = n_fresh, best = row;
    }
    if (most == 0) return;
    for (int a = 0; a < kSwitches; ++a)
      for (int b = a + 1; b < kSwitches; ++b)
        for (int c = b + 1; c < kSwitches; ++c) met[place(best, a, b, c)] = true;
    rows.push_back(best);
  };
  for (int a = 0; a < kSwitches; ++a)
    for (int b = a + 1; b < kSwitches; ++b)
      for (int c = b + 1; c < kSwitches; ++c)
        for (int i = 0; i < kValues[a] * kValues[b] * kValues[c]; ++i) {
          Row row;
          row.fill(-1);
          row[size_t(a)] = i % kValues[a], row[size_t(b)] = i / kValues[a] % kValues[b];
          row[size_t(c)] = i / kValues[a] / kValues[b];
          if (!legal(row)) continue;
          for (int tries = 0; tries < 5 && !met[place(row, a, b, c)]; ++tries) meet(row);
          INFO("switches " << a << " " << b << " " << c << ", number " << i);
          REQUIRE(met[place(row, a, b, c)]);
        }
  return rows;
}

TEST_CASE("parity: all settings give one hash, whatever three switches are combined", "[parity]") {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr size_t kStride = 9;  // a sanitizer run takes every ninth row
#else
  constexpr size_t kStride = 1;
#endif
  for (const BatchPolicy& policy : batch_policies())
    CHECK(std::ranges::any_of(batchings, [&](auto& b) { return std::string(policy.name) == b.first; }));
  for (const ChunkPolicy& policy : chunk_policies())
    CHECK(std::ranges::any_of(cuts, [&](auto& cut) { return std::string(policy.name) == cut; }));
  const std::vector<Row> rows = rows_of_triples();
  std::map<int, int64_t> hits;
  int64_t drafted[std::size(drafts)] = {};
  size_t ran = 0;
  for (size_t i = 0; i < rows.size(); i += kStride, ++ran) {
    const RaggedRun run = check(rows[i]);
    // A preempted prompt and the lender of a copy find blocks of the same prompt.
    const bool own_blocks = rows[i][kScarce] || rows[i][kDisagg] == 3;
    hits[rows[i][kMemory]] += own_blocks ? 0 : run.hit_tokens;
    drafted[rows[i][kDraft]] += run.draft_tokens;
  }
  // Reuse, drafts and dtypes really happened, so the hash covers them.
  for (const auto& [m, n] : hits) {
    INFO(memories[m].scheme << " " << memories[m].block_tokens << " share " << int(memories[m].share));
    if (kStride == 1) CHECK((n > 0) == memories[m].reuses);
  }
  CHECK((drafted[0] == 0 && drafted[1] > 0 && drafted[2] > 0));
  std::set<uint64_t> hashes;
  for (Dtype dtype : kKvDtypes) CHECK(hashes.insert(expected({.kv_dtype = dtype})).second);
  std::printf("parity: %zu of %zu runs, in which all of three switches' values meet, have the hash of their dtypes\n",
              ran, rows.size());
}

// `make check STAGE=parity` draws these from the whole table.
TEST_CASE("parity: two thousand random rows of the whole table give the hash", "[.][all-waves]") {
  const char* seeds = std::getenv("SEEDS");
  for (uint64_t seed = 0; seed < (seeds ? std::strtoull(seeds, nullptr, 10) : 2000); ++seed) {
    INFO("seed " << seed);
    Random random(seed);
    Row row;
    do row.fill(-1);
    while (!fill(row, random, [](const Row&, int) { return 0; }));
    check(row);
  }
}

}  // namespace xpyd::testing::parity_test
