#include "disagg/transfer_plan.h"

#include <algorithm>

#include "base/status.h"

namespace xpyd::disagg {

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan) {
  plan.copies.clear();
  plan.bytes = add_copies(source, destination, region, plan.copies);
}

ShardMap map_shards(const KvShards& source, const KvShards& destination, ReplicaUse use) {
  XPYD_CHECK(check_shards(source).ok() && check_shards(destination).ok());
  XPYD_CHECK(source.n_layers == destination.n_layers && source.n_kv_heads == destination.n_kv_heads);
  ShardMap map{source, destination, {}};
  const int replicas = source.replicas();
  for (int to = 0; to < destination.n_ranks(); ++to) {
    const KvRect wanted = destination.rect(to);
    // Ranks that want the same heads ask different holders of them.
    const int twin = destination.tensor_rank_of(to) % destination.replicas();
    for (int stage = 0; stage < source.pp; ++stage) {
      const KvRange held = source.layers(stage);
      const KvRange layers{std::max(wanted.layers.begin, held.begin), std::min(wanted.layers.end, held.end)};
      if (layers.size() <= 0) continue;
      for (int head = wanted.heads.begin; head < wanted.heads.end;) {
        const int owner = source.first_owner(head);
        const int end = std::min(wanted.heads.end, source.heads(owner).end);
        const int parts = use == ReplicaUse::stripe ? replicas : 1;
        for (int part = 0; part < parts; ++part) {
          const int replica = (twin + part) % replicas;
          map.moves.push_back({.source_rank = stage * source.tp + owner + replica,
                               .destination_rank = to,
                               .rect = {layers, {head, end}},
                               .part = part,
                               .parts = parts});
        }
        head = end;
      }
    }
  }
  return map;
}

void plan_sharded_transfer(const ShardMap& map, std::span<const KvView> source, std::span<const KvView> destination,
                           const KvRegion& region, TransferPlan& plan) {
  XPYD_CHECK(int(source.size()) == map.source.n_ranks() && int(destination.size()) == map.destination.n_ranks());
  plan.copies.clear();
  plan.bytes = 0;
  for (const ShardMove& move : map.moves) {
    const KvRect from = map.source.rect(move.source_rank), to = map.destination.rect(move.destination_rank);
    const int layer_begin = std::max(region.layer_begin, move.rect.layers.begin);
    const int layer_end = std::min(region.layer_end, move.rect.layers.end);
    const KvRange part = token_part(region.token_end - region.token_begin, move.part, move.parts);
    if (layer_begin >= layer_end || part.size() <= 0) continue;
    plan.bytes += add_copies(source[size_t(move.source_rank)], destination[size_t(move.destination_rank)],
                             {.token_begin = region.token_begin + part.begin,
                              .token_end = region.token_begin + part.end,
                              .layer_begin = layer_begin - from.layers.begin,
                              .layer_end = layer_end - from.layers.begin,
                              .head_begin = move.rect.heads.begin - from.heads.begin,
                              .head_end = move.rect.heads.end - from.heads.begin,
                              .to_layer = layer_begin - to.layers.begin,
                              .to_head = move.rect.heads.begin - to.heads.begin},
                             plan.copies);
  }
}

}  // namespace xpyd::disagg
