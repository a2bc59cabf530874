#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <tuple>

#include "base/memory.h"
#include "base/random.h"
#include "disagg/handover/transfer_plan.h"
#include "tests/catch.h"

namespace xpyd::testing::shard_plan_test {

KvShards shards(int n_layers, int n_kv_heads, int tp, int pp = 1) {
  return {.n_layers = n_layers, .n_kv_heads = n_kv_heads, .tp = tp, .pp = pp};
}

bool inside(const KvRect& part, const KvRect& whole) {
  auto within = [](KvRange a, KvRange b) { return a.begin >= b.begin && a.end <= b.end; };
  return within(part.layers, whole.layers) && within(part.heads, whole.heads);
}

// Returns "" if every (destination rank, layer, head) is written exactly once and every read lies inside the source's
// shard.
std::string first_fault(const ShardMap& map) {
  std::map<std::tuple<int, int, int>, int> written;
  for (const ShardMove& m : map.moves) {
    if (m.rect.layers.size() < 1 || m.rect.heads.size() < 1) return "an empty move";
    if (!inside(m.rect, map.source.rect(m.source_rank))) return "reads outside the source's shard";
    if (!inside(m.rect, map.destination.rect(m.destination_rank))) return "writes outside";
    for (int l = m.rect.layers.begin; l < m.rect.layers.end; ++l)
      for (int h = m.rect.heads.begin; h < m.rect.heads.end; ++h)
        if (written[{m.destination_rank, l, h}]++ > 0) return "a cell is written twice";
  }
  size_t cells = 0;
  for (int rank = 0; rank < map.destination.n_ranks(); ++rank)
    cells += size_t(map.destination.rect(rank).layers.size() * map.destination.rect(rank).heads.size());
  return written.size() == cells ? "" : "a cell is not written";
}

// Other systems read past the buffer where D has more ranks than kv heads (sglang#31968, #30997), and numbered layers
// within a stage where P and D have unequal pp (vllm#43366).
TEST_CASE("shards: every (rank, layer, head) is written once, in every configuration", "[shards]") {
  int n_configurations = 0;
  const auto check = [&](const KvShards& from, const KvShards& to) {
    ++n_configurations;
    const std::string fault = first_fault(map_shards(from, to));
    if (fault.empty()) return;
    INFO("n " << from.n_kv_heads << " tp " << from.tp << " -> " << to.tp << " pp " << from.pp << " -> " << to.pp
              << " layers " << from.n_layers);
    REQUIRE(fault == "");
  };
  for (int n : {1, 2, 4, 8})
    for (int a : {1, 2, 4, 8, 16})
      for (int b : {1, 2, 4, 8, 16})
        for (int p : {1, 2, 3, 4})
          for (int q : {1, 2, 3})
            for (int L : {4, 7, 61}) check(shards(L, n, a, p), shards(L, n, b, q));
  CHECK(n_configurations == 3600);
  // Heads that tp does not divide.
  for (int a : {1, 3, 5, 7, 8, 16})
    for (int b : {2, 3, 6, 8, 24}) {
      const KvShards from = shards(11, 8, a, 3), to = shards(11, 8, b, 2);
      check(from, to);
      check(to, from);
    }
}

TEST_CASE("shards: layers are divided among stages, and the remainder goes to the last ones", "[shards]") {
  auto sizes = [](KvShards s) {
    std::vector<int> n;
    for (int i = 0; i < s.pp; ++i) n.push_back(s.layers(i).size());
    return n;
  };
  KvShards s = shards(61, 8, 1, 4);
  CHECK(sizes(s) == std::vector{15, 15, 15, 16});  // the last one, which chunked prompts prefer
  s.n_layers = 62;
  CHECK(sizes(s) == std::vector{15, 15, 16, 16});
  s.n_layers = 64;
  CHECK(sizes(s) == std::vector{16, 16, 16, 16});
}

TEST_CASE("shards: an impossible number is an error that names its option", "[shards]") {
  for (const auto& [s, says] :
       {std::pair{shards(4, 8, 0), "--decode-tp 0: expected at least 1"},
        {shards(4, 8, 1, -1), "--decode-pp -1: expected at least 1"},
        {shards(4, 8, 1, 5), "--decode-pp 5: there are more stages than the 4 layers"},
        {shards(4, 8, 12),
         "--decode-tp 12: there are more ranks than the 8 kv heads; expected a multiple of their number"}}) {
    const Status status = check_shards(s, "--decode-tp", "--decode-pp");
    INFO(says);
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().message.find(says) != std::string::npos);
  }
  CHECK(check_shards(shards(4, 8, 2, 4), "--decode-tp", "--decode-pp").ok());
}

struct Published {
  int n, a, pa, b, pb;
  size_t edges, sources;
};

TEST_CASE("shards: edges and senders are those of the published table", "[shards]") {
  // MLA has one kv head. A P rank that nobody reads has no edge, or it waits for a reader for ever (vllm#27274).
  // reference: 8 2->4, 8 4->2, 8 8->16, 8 16->8, 2 1->4, MLA 16->4, 8 (4,PP4)->(8,PP1)
  for (Published row :
       {Published{8, 2, 1, 4, 1, 4, 2}, Published{8, 4, 1, 2, 1, 4, 4}, Published{8, 8, 1, 16, 1, 16, 8},
        Published{8, 16, 1, 8, 1, 8, 8}, Published{2, 1, 1, 4, 1, 4, 1}, Published{1, 16, 1, 4, 1, 4, 4},
        Published{8, 4, 4, 8, 1, 32, 16}}) {
    std::set<std::pair<int, int>> edges;
    std::set<int> sources;
    for (const ShardMove& move : map_shards(shards(8, row.n, row.a, row.pa), shards(8, row.n, row.b, row.pb)).moves) {
      edges.insert({move.source_rank, move.destination_rank});
      sources.insert(move.source_rank);
    }
    INFO("kv heads " << row.n << " tp " << row.a << " -> " << row.b);
    CHECK(edges.size() == row.edges);
    CHECK(sources.size() == row.sources);
  }
}

// ---- One sequence in the KV of every rank of one side.

struct Side {
  // If `contiguous`, the sequence is in one slot, a block of `block_tokens`.
  Side(const KvShape& whole, const KvShards& s, KvOrder order, int block_tokens, int n_tokens, Random& random,
       bool contiguous = false)
      : shards(s) {
    const int n_blocks = (n_tokens + block_tokens - 1) / block_tokens;
    for (int i = 0; i < n_blocks; ++i) table.push_back(2 * i);  // no two are neighbours
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
    for (int rank = 0; rank < s.n_ranks(); ++rank) {
      layouts.push_back({rank_shape(whole, s, rank), order, block_tokens, 2 * n_blocks});
      pools.emplace_back(layouts.back().pool_bytes());
      std::memset(pools.back().data(), 0xee, pools.back().size());
    }
    for (size_t rank = 0; rank < pools.size(); ++rank)
      views.push_back(
          {pools[rank].data(), &layouts[rank], contiguous ? nullptr : table.data(), contiguous ? table[0] : 0});
  }
  // Calls f(row in this side's copy, layer, kv, token, head), in numbers of the whole model.
  template <class F>
  void each_row(int n_tokens, F&& f) const {
    for (int rank = 0; rank < shards.n_ranks(); ++rank) {
      const KvRect own = shards.rect(rank);
      for (int l = own.layers.begin; l < own.layers.end; ++l)
        for (int kv = 0; kv < 2; ++kv)
          for (int t = 0; t < n_tokens; ++t)
            for (int h = own.heads.begin; h < own.heads.end; ++h)
              f(views[size_t(rank)].row(l - own.layers.begin, kv, t, h - own.heads.begin), l, kv, t, h);
    }
  }
  KvShards shards;
  std::vector<int32_t> table;
  std::vector<KvLayout> layouts;
  std::vector<Buffer> pools;
  std::vector<KvView> views;
};

uint32_t pattern(int l, int kv, int t, int h) { return uint32_t(((l * 2 + kv) * 1024 + t) * 64 + h) * 2654435761u | 1; }

// Moves a region, compares every row of it, and counts what else has changed. Returns the number of copies.
size_t move_and_check(const KvShape& whole, Side& source, Side& destination, int n_tokens, const KvRegion& region) {
  const ShardMap map = map_shards(source.shards, destination.shards);
  source.each_row(n_tokens, [&](std::byte* row, int l, int kv, int t, int h) {
    const uint32_t p = pattern(l, kv, t, h);
    for (size_t i = 0; i < whole.row_bytes(); i += 4) std::memcpy(row + i, &p, 4);
  });
  TransferPlan plan;  // used for one move after another: old contents must not matter
  size_t n_copies = 0, bytes = 0, planned = 0, expected = 0, wrong = 0, touched = 0;
  for (const ShardMove& move : map.moves) {
    plan_sharded_transfer({map.source, map.destination, {move}}, source.views, destination.views, region, plan);
    const Buffer &src = source.pools[size_t(move.source_rank)], &dst = destination.pools[size_t(move.destination_rank)];
    for (const Copy& c : plan.copies) {
      REQUIRE((c.source >= src.data() && c.source + c.bytes <= src.data() + src.size()));
      REQUIRE((c.destination >= dst.data() && c.destination + c.bytes <= dst.data() + dst.size()));
      std::memcpy(c.destination, c.source, c.bytes);
      bytes += c.bytes;
    }
    planned += plan.bytes;
    n_copies += plan.copies.size();
  }
  destination.each_row(n_tokens, [&](const std::byte* row, int l, int kv, int t, int h) {
    if (l < region.layer_begin || l >= region.layer_end || t < region.token_begin || t >= region.token_end) return;
    const uint32_t p = pattern(l, kv, t, h);
    expected += whole.row_bytes();
    for (size_t i = 0; i < whole.row_bytes(); i += 4) wrong += std::memcmp(row + i, &p, 4) != 0;
  });
  for (const Buffer& pool : destination.pools)
    for (size_t i = 0; i < pool.size() / 4; ++i) touched += pool.as<uint32_t>()[i] != 0xeeeeeeeeu ? 4 : 0;
  CHECK((wrong == 0 && touched == expected));
  CHECK((bytes == expected && planned == expected));
  if (map.source.n_ranks() * map.destination.n_ranks() == 1) {
    plan_transfer(source.views[0], destination.views[0], region, plan);
    CHECK((plan.bytes == expected && plan.copies.size() == n_copies));
  }
  return n_copies;
}

TEST_CASE("a transfer moves every row of the region and no other, between any ranks and memories", "[shards]") {
  Random random(5);
  const KvShape whole{.n_layers = 5, .n_kv_heads = 4, .head_dim = 2, .dtype = Dtype::f32};
  constexpr int kTokens = 37;
  for (int round = 0; round < 900; ++round) {
    const auto side = [&] {
      const int tp = round % 3 ? int(std::vector{1, 2, 3, 4, 8, 16}[random.below(6)]) : 1;
      const bool contiguous = random.below(3) == 0;
      return Side(whole, shards(5, 4, tp, round % 3 ? 1 + int(random.below(5)) : 1),
                  random.below(2) ? KvOrder::layer_major : KvOrder::token_major,
                  contiguous ? 64 : std::vector{1, 4, 16, 64}[random.below(4)], kTokens, random, contiguous);
    };
    const auto part_of = [&](int n) {
      const int begin = int(random.below(uint64_t(n)));
      return std::pair(begin, begin + 1 + int(random.below(uint64_t(n - begin))));
    };
    Side from = side(), to = side();
    const auto [token_begin, token_end] = part_of(kTokens);
    const auto [layer_begin, layer_end] = part_of(5);
    INFO("round " << round << ": tp " << from.shards.tp << " pp " << from.shards.pp << " -> tp " << to.shards.tp
                  << " pp " << to.shards.pp);
    move_and_check(whole, from, to, kTokens, {token_begin, token_end, layer_begin, layer_end});
  }
}

TEST_CASE("a full block crosses in as few copies as its order and the ranks' heads allow", "[shards]") {
  Random random(6);
  constexpr int kBlock = 8, kBlocks = 3, kPlanes = 2 * 5;
  const KvShape whole{.n_layers = 5, .n_kv_heads = 4, .head_dim = 2};
  const struct {
    int tp;  // of the source; the destination has one rank
    KvOrder order;
    int copies;  // of a block
  } kRows[] = {{1, KvOrder::token_major, 1},
               {1, KvOrder::layer_major, kPlanes},
               {4, KvOrder::token_major, 4 * kPlanes * kBlock},
               {4, KvOrder::layer_major, 4 * kPlanes * kBlock}};
  for (const auto& [tp, order, copies] : kRows) {
    INFO("tp " << tp << " order " << int(order));
    Side from(whole, shards(5, 4, tp), order, kBlock, kBlock * kBlocks, random),
        to(whole, shards(5, 4, 1), order, kBlock, kBlock * kBlocks, random);
    CHECK(move_and_check(whole, from, to, kBlock * kBlocks, {0, kBlock * kBlocks, 0, 5}) == size_t(copies * kBlocks));
  }
}

TEST_CASE("the numbers in the arithmetic of the hand-over's README are those of a 1B Llama", "[shards]") {
  Random random(7);
  const KvShape llama{.n_layers = 16, .n_kv_heads = 8, .head_dim = 64, .dtype = Dtype::bf16};
  constexpr int kTokens = 2048, kBlock = 16;
  const auto pieces = [&](int from_tp, int to_tp, KvOrder order = KvOrder::layer_major) {
    KvShape whole = llama;
    whole.head_dim = 2;  // the number of pieces does not depend on it
    const Side from(whole, shards(16, 8, from_tp), order, kBlock, kTokens, random),
        to(whole, shards(16, 8, to_tp), order, kBlock, kTokens, random);
    TransferPlan plan;
    plan_sharded_transfer(map_shards(from.shards, to.shards), from.views, to.views, {0, kTokens, 0, 16}, plan);
    return plan.copies.size();
  };
  std::ifstream file("disagg/handover/README.md");
  const std::string readme{std::istreambuf_iterator<char>(file), {}};
  const auto has = [&](const std::string& text) { return readme.find(text) != readme.npos; };
  CHECK(has("bytes: " + std::to_string(llama.token_bytes() >> 10) + " KiB for a 1B Llama (16 layers, 8 · 64) in bf16"));
  CHECK(has("2,048 tokens are " + std::to_string(std::lround(kTokens * double(llama.token_bytes()) * 1e-6)) + " MB"));
  CHECK((pieces(1, 1) == 4096 && has("layer_major (4,096)")));
  CHECK((pieces(1, 1, KvOrder::token_major) == 128 && has("token_major (128)")));
  CHECK((pieces(2, 4) == 16 * pieces(4, 4) && has("sends 16 times the pieces of tp 4 to tp 4")));
}

}  // namespace xpyd::testing::shard_plan_test
