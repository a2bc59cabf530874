// Edges, bytes and messages of a plan between two shapes.
#pragma once

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "disagg/transfer_plan.h"

namespace xpyd::experiments {

// What a map costs. One message is one contiguous piece on both sides, as add_copies (kv_copy.h)
// makes them when no two blocks are neighbours.
struct ShardTraffic {
  int edges = 0;                // pairs of ranks that exchange anything
  int sources = 0;              // ranks that send anything
  int64_t bytes = 0;            // of one full block
  int64_t unique_bytes = 0;     // … without the copies of kv heads
  int64_t messages = 0;         // of one full block
  int64_t most_sent_bytes = 0;  // by one source rank, of one full block
};
// Both sides have this order and this block size.
inline ShardTraffic shard_traffic(const ShardMap& map, const KvShape& whole, KvOrder order, int block_tokens) {
  ShardTraffic t;
  std::set<std::pair<int, int>> edges;
  std::vector<int64_t> sent(size_t(map.source.n_ranks()), 0);
  for (const ShardMove& move : map.moves) {
    const int tokens = token_part(block_tokens, move.part, move.parts).size();
    if (tokens == 0) continue;
    const int n_layers = move.rect.layers.size(), n_heads = move.rect.heads.size();
    const int64_t bytes = int64_t(tokens) * n_layers * n_heads * 2 * int64_t(whole.row_bytes());
    const KvRect from = map.source.rect(move.source_rank), to = map.destination.rect(move.destination_rank);
    const bool all_heads = from.heads == move.rect.heads && to.heads == move.rect.heads;
    const bool all_layers = from.layers == move.rect.layers && to.layers == move.rect.layers;
    const int planes = 2 * n_layers;
    if (!all_heads) {
      t.messages += int64_t(planes) * tokens;
    } else if (order == KvOrder::layer_major) {
      t.messages += planes;
    } else {
      t.messages += all_layers ? 1 : tokens;
    }
    t.bytes += bytes;
    sent[size_t(move.source_rank)] += bytes;
    edges.insert({move.source_rank, move.destination_rank});
  }
  t.edges = int(edges.size());
  t.unique_bytes = int64_t(block_tokens) * int64_t(whole.token_bytes());
  t.most_sent_bytes = *std::max_element(sent.begin(), sent.end());
  t.sources = int(std::count_if(sent.begin(), sent.end(), [](int64_t b) { return b > 0; }));
  return t;
}

}  // namespace xpyd::experiments
