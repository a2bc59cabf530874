#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "base/memory.h"
#include "base/random.h"
#include "disagg/handover/transfer_plan.h"
#include "tests/catch.h"

namespace xpyd::testing::shard_plan_test {
namespace {

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
  int edges, copies;  // bytes / unique bytes
  int sources;
};

TEST_CASE("shards: edges and bytes equal those of the published table", "[shards]") {
  // reference: 8 2->4, 8 4->2, 8 8->16, 8 16->8, 2 1->4, MLA 16->4, 8 (4,PP4)->(8,PP1)
  for (Published row :
       {Published{8, 2, 1, 4, 1, 4, 1, 2}, Published{8, 4, 1, 2, 1, 4, 1, 4}, Published{8, 8, 1, 16, 1, 16, 2, 8},
        Published{8, 16, 1, 8, 1, 8, 1, 8}, Published{2, 1, 1, 4, 1, 4, 2, 1}, Published{1, 16, 1, 4, 1, 4, 4, 4},
        Published{8, 4, 4, 8, 1, 32, 1, 16}}) {
    const ShardMap map = map_shards(shards(8, row.n, row.a, row.pa), shards(8, row.n, row.b, row.pb));
    std::set<std::pair<int, int>> edges;
    std::set<int> sources;
    int cells = 0;  // (layer, head) pairs that move
    for (const ShardMove& move : map.moves) {
      edges.insert({move.source_rank, move.destination_rank});
      sources.insert(move.source_rank);
      cells += move.rect.layers.size() * move.rect.heads.size();
    }
    INFO("kv heads " << row.n << " tp " << row.a << " -> " << row.b);
    CHECK(int(edges.size()) == row.edges);
    CHECK(cells == row.copies * 8 * row.n);
    CHECK(int(sources.size()) == row.sources);
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

// ---- Faults of other systems (reference: scheduling 3.5), each under its name.

// sglang#31968, #30997: num_groups = d_tp / p_tp read past the buffer where d_tp > n_kv. Qwen has 2 kv heads; with P tp
// 1 and D tp 4, four groups of one head each were read of two, because there is no half head. vllm#27274: MLA has one
// kv head, which 16 P ranks hold and 4 D ranks read. Ranks that nobody reads have no edge, and a wait for a reader of
// each P rank never ends. So the map says what a rank waits for. vllm#43366: with unequal pp, layers go by their number
// in the model. P has stages of 2, 2 and 3 of 7 layers, and D of 3 and 4.
TEST_CASE("sglang#31968, #30997, vllm#27274, #43366: each rank sends its layers and heads to the ranks that need them",
          "[shards]") {
  const struct {
    KvShards from, to;
    std::vector<std::pair<int, int>> edges;
    std::vector<KvRect> moved;  // layers, heads
  } kRows[] = {{shards(2, 2, 1),
                shards(2, 2, 4),
                {{0, 0}, {0, 1}, {0, 2}, {0, 3}},
                {{{0, 2}, {0, 1}}, {{0, 2}, {0, 1}}, {{0, 2}, {1, 2}}, {{0, 2}, {1, 2}}}},
               {shards(4, 1, 16), shards(4, 1, 4), {{0, 0}, {1, 1}, {2, 2}, {3, 3}}, {4, {{0, 4}, {0, 1}}}},
               {shards(7, 1, 1, 3),
                shards(7, 1, 1, 2),
                {{0, 0}, {1, 0}, {1, 1}, {2, 1}},
                {{{0, 2}, {0, 1}}, {{2, 3}, {0, 1}}, {{3, 4}, {0, 1}}, {{4, 7}, {0, 1}}}}};
  for (const auto& [from, to, edges, moved] : kRows) {
    std::vector<std::pair<int, int>> seen;
    std::vector<KvRect> rects;
    for (const ShardMove& m : map_shards(from, to).moves) {
      seen.push_back({m.source_rank, m.destination_rank});
      rects.push_back(m.rect);
    }
    CHECK(seen == edges);
    CHECK(std::ranges::equal(
        rects, moved, [](const KvRect& a, const KvRect& b) { return a.layers == b.layers && a.heads == b.heads; }));
  }
}

}  // namespace
}  // namespace xpyd::testing::shard_plan_test
