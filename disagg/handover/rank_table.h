// RankTable is the rank table of the xPyD design that used NCCL groups (vLLM's `simple_connector` and the blog notes
// about it). It gives the group, rank and port of each rank, for any number of instances, tensor-parallel ranks and
// stages. xpyd itself needs no groups, because both sides plan from their shapes (transfer_plan.h); `xpyd info --ranks`
// prints the table for readers of those notes. tests/disagg/rank_table_test.cc has the notes' formulas, which hold
// where P's tp divides D's and D's divides the heads, and every printed mistake.
//
// A group consists of the ranks between which KV goes: the ranks of P and D that the moves of map_shards() connect, in
// all instances. In the notes' case this is one P rank and the D ranks that hold its heads. If the stages are cut at
// different layers, the group may contain all ranks.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "disagg/handover/transfer_plan.h"

namespace xpyd::disagg {

struct RankTable {
  struct Row {
    bool prefill = true;
    int kv_rank = 0;  // number of the instance: P from 0, then D
    int rank = 0;     // in its instance, stage by stage
    int group = -1;   // -1: sends nothing, because another rank has the same heads
    int group_rank = 0, group_size = 0;
    int global_rank = 0;
    int port() const { return 2 * group + 1; }  // of data, relative to a base port; signals use the next port
  };
  int n_groups = 0;
  std::vector<Row> rows;  // by global_rank

  RankTable(int n_prefill, int n_decode, const KvShards& p, const KvShards& d) {
    const int p_ranks = p.n_ranks(), d_ranks = d.n_ranks();
    std::vector<int> first(size_t(p_ranks + d_ranks));  // lowest rank of each rank's group, P before D
    std::iota(first.begin(), first.end(), 0);
    std::vector<bool> moves(first.size());
    for (const ShardMove& move : map_shards(p, d).moves) {
      const size_t from = size_t(move.source_rank), to = size_t(p_ranks + move.destination_rank);
      moves[from] = moves[to] = true;
      const auto [low, high] = std::minmax({first[from], first[to]});
      std::ranges::replace(first, high, low);
    }
    std::vector<int> group(first.size(), -1), size(first.size());
    for (size_t i = 0; i < first.size(); ++i)
      if (moves[i]) group[i] = first[i] == int(i) ? n_groups++ : group[size_t(first[i])];
    for (int k = 0; k < n_prefill + n_decode; ++k)
      for (int r = 0; r < (k < n_prefill ? p_ranks : d_ranks); ++r) {
        Row row{.prefill = k < n_prefill, .kv_rank = k, .rank = r, .global_rank = int(rows.size())};
        row.group = group[size_t(row.prefill ? r : p_ranks + r)];
        if (row.group >= 0) row.group_rank = size[size_t(row.group)]++;
        rows.push_back(row);
      }
    for (Row& row : rows)
      if (row.group >= 0) row.group_size = size[size_t(row.group)];
  }
};

}  // namespace xpyd::disagg
