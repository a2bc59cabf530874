// The rank table beside the formulas of the notes that it comes from (reference: scheduling 3.1, corrected by the
// errata of 3.2).
#include "disagg/handover/rank_table.h"

#include <map>
#include <set>
#include <vector>

#include "disagg/handover/transfer_plan.h"
#include "tests/catch.h"

namespace xpyd::testing::rank_table_test {
namespace {

// PS prefill instances of PTP ranks, and DS decode instances of DTP ranks. PTP divides DTP, and DTP divides the heads.
// A group has P rank r of every P instance, and the ranks of every D instance that hold its heads. `kv_rank` counts
// instances.
struct Notes {
  int ps = 1, ds = 1, ptp = 1, dtp = 1;
  bool is_prefill(int k) const { return k < ps; }
  int tp_of(int k) const { return is_prefill(k) ? ptp : dtp; }
  int tpm() const { return dtp / ptp; }
  int group(int k, int r) const { return is_prefill(k) ? r : r / tpm(); }
  int group_rank(int k, int r) const { return is_prefill(k) ? k : ps + (k - ps) * tpm() + r % tpm(); }
  int group_size() const { return ps + ds * tpm(); }
  int global_rank(int k, int r) const { return is_prefill(k) ? k * ptp + r : ps * ptp + (k - ps) * dtp + r; }
  int port(int k, int r) const { return 2 * group(k, r) + 1; }
  // The heads of D rank r within the P rank of its group, in that rank's own numbers.
  KvRange slice(int r, int n_kv_heads) const {
    const int part = r % tpm(), heads = n_kv_heads / dtp;
    return {part * heads, (part + 1) * heads};
  }
};

KvShards shards(int tp, int pp = 1, int n_kv_heads = 8) {
  return {.n_layers = 4, .n_kv_heads = n_kv_heads, .tp = tp, .pp = pp};
}

TEST_CASE("rank table: it follows the notes' formulas where there are any, and slices are what the planner sends",
          "[shards]") {
  for (int ps : {1, 2, 3})
    for (int ds : {1, 2, 4})
      for (int ptp : {1, 2, 4})
        for (int dtp : {1, 2, 4, 8}) {
          if (dtp % ptp != 0) continue;
          const Notes notes{ps, ds, ptp, dtp};
          const KvShards from = shards(ptp), to = shards(dtp);
          const RankTable t(ps, ds, from, to);
          CHECK(t.n_groups == ptp);
          REQUIRE(int(t.rows.size()) == ps * ptp + ds * dtp);
          size_t at = 0;
          for (int k = 0; k < ps + ds; ++k)
            for (int r = 0; r < notes.tp_of(k); ++r, ++at) {
              const RankTable::Row& row = t.rows[at];
              CHECK((row.kv_rank == k && row.rank == r));
              CHECK((row.group == notes.group(k, r) && row.group_rank == notes.group_rank(k, r)));
              CHECK((row.group_size == notes.group_size() && row.global_rank == notes.global_rank(k, r)));
              CHECK(row.port() == notes.port(k, r));
            }
          for (const ShardMove& m : map_shards(from, to).moves) {
            CHECK(m.source_rank == notes.group(ps, m.destination_rank));
            const int origin = from.rect(m.source_rank).heads.begin;
            const KvRange slice = notes.slice(m.destination_rank, 8);
            CHECK(m.rect.heads == KvRange{origin + slice.begin, origin + slice.end});
          }
        }
}

// There is no formula for fewer ranks of D than of P, for stages and for replicas. Ranks that exchange KV are in one
// group, and no others are.
TEST_CASE("rank table: for any ranks and stages, a group has exactly the ranks that exchange KV", "[shards]") {
  int groups = 0, silent = 0;
  for (int heads : {1, 2, 8})
    for (int ptp : {1, 2, 4, 8})
      for (int dtp : {1, 2, 4, 8})
        for (int ppp : {1, 2, 4})
          for (int dpp : {1, 2, 3}) {
            const KvShards from = shards(ptp, ppp, heads), to = shards(dtp, dpp, heads);
            const int ps = 2, ds = 3, p_ranks = from.n_ranks(), d_ranks = to.n_ranks();
            const RankTable t(ps, ds, from, to);
            REQUIRE(int(t.rows.size()) == ps * p_ranks + ds * d_ranks);
            const auto row = [&](int k, int r) -> const RankTable::Row& {
              return t.rows[size_t(k < ps ? k * p_ranks + r : ps * p_ranks + (k - ps) * d_ranks + r)];
            };
            // Ranks that a rank of P reaches by moves, in as many rounds as there are ranks.
            const std::vector<ShardMove> moves = map_shards(from, to).moves;
            for (int start = 0; start < p_ranks; ++start) {
              std::set<int> p = {start}, d;
              for (int round = 0; round < p_ranks + d_ranks; ++round)
                for (const ShardMove& m : moves) {
                  if (p.contains(m.source_rank)) d.insert(m.destination_rank);
                  if (d.contains(m.destination_rank)) p.insert(m.source_rank);
                }
              const RankTable::Row& own = row(0, start);
              silent += d.empty();
              REQUIRE((own.group < 0) == d.empty());
              if (d.empty()) continue;
              CHECK(own.group_size == ps * int(p.size()) + ds * int(d.size()));
              for (int r = 0; r < p_ranks; ++r) CHECK((row(ps - 1, r).group == own.group) == p.contains(r));
              for (int r = 0; r < d_ranks; ++r) CHECK((row(ps + ds - 1, r).group == own.group) == d.contains(r));
            }
            std::map<int, std::set<int>> in_group;
            for (size_t i = 0; i < t.rows.size(); ++i) {
              CHECK(t.rows[i].global_rank == int(i));
              if (t.rows[i].group >= 0) CHECK(in_group[t.rows[i].group].insert(t.rows[i].group_rank).second);
            }
            CHECK(int(in_group.size()) == t.n_groups);
            for (const auto& [group, ranks] : in_group) CHECK(*ranks.rbegin() == int(ranks.size()) - 1);
            groups = std::max(groups, t.n_groups);
          }
  CHECK(groups == 24);  // 8 heads, by layers 0, 1, and 2 with 3
  CHECK(silent > 0);    // P ranks whose heads other ranks send
}

}  // namespace
}  // namespace xpyd::testing::rank_table_test
