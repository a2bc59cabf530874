#include "disagg/handover/transfer_plan.h"

#include <algorithm>

namespace xpyd::disagg {
namespace {

std::vector<KvView> views_of(const KvMemory& memory, KvHandle kv) {
  std::vector<KvView> views;
  for (int rank = 0; rank < memory.n_ranks(); ++rank) views.push_back(memory.view(kv, rank));
  return views;
}

}  // namespace

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan) {
  plan.copies.clear();
  plan.bytes = add_copies(source, destination, region, plan.copies);
}

ShardMap map_shards(const KvShards& source, const KvShards& destination) {
  XPYD_CHECK(check_shards(source).ok() && check_shards(destination).ok());
  XPYD_CHECK(source.n_layers == destination.n_layers && source.n_kv_heads == destination.n_kv_heads);
  ShardMap map{source, destination, {}};
  for (int to = 0; to < destination.n_ranks(); ++to) {
    const KvRect wanted = destination.rect(to);
    // Ranks that need the same heads ask different holders of them.
    const int twin = destination.tensor_rank_of(to) % destination.replicas();
    for (int stage = 0; stage < source.pp; ++stage) {
      const KvRange held = source.layers(stage);
      const KvRange layers{std::max(wanted.layers.begin, held.begin), std::min(wanted.layers.end, held.end)};
      if (layers.size() <= 0) continue;
      for (int head = wanted.heads.begin; head < wanted.heads.end;) {
        const int owner = source.first_owner(head);
        const int end = std::min(wanted.heads.end, source.heads(owner).end);
        map.moves.push_back({.source_rank = stage * source.tp + owner + twin % source.replicas(),
                             .destination_rank = to,
                             .rect = {layers, {head, end}}});
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
    if (layer_begin >= layer_end || region.token_begin >= region.token_end) continue;
    plan.bytes += add_copies(source[size_t(move.source_rank)], destination[size_t(move.destination_rank)],
                             {.token_begin = region.token_begin,
                              .token_end = region.token_end,
                              .layer_begin = layer_begin - from.layers.begin,
                              .layer_end = layer_end - from.layers.begin,
                              .head_begin = move.rect.heads.begin - from.heads.begin,
                              .head_end = move.rect.heads.end - from.heads.begin,
                              .to_layer = layer_begin - to.layers.begin,
                              .to_head = move.rect.heads.begin - to.heads.begin},
                             plan.copies);
  }
}

// ---- Places.

KvPlace place_of(const KvMemory& memory, KvHandle kv, const RemoteKey& registration, int cached_tokens) {
  const KvView view = memory.view(kv);
  KvPlace place{.registration = registration, .slot = view.slot, .cached_tokens = cached_tokens};
  const auto blocks = memory.blocks(kv);
  if (!view.contiguous()) place.blocks.assign(blocks.begin(), blocks.end());
  return place;
}

std::vector<MemoryRange> rows_of(const KvMemory& memory, KvHandle kv, int token_begin, int token_end) {
  std::vector<MemoryRange> rows;
  TransferPlan plan;
  for (int rank = 0; rank < memory.n_ranks(); ++rank) {
    const KvView view = memory.view(kv, rank);
    plan_transfer(view, view, {token_begin, token_end, 0, view.layout->shape.n_layers}, plan);
    for (const Copy& copy : plan.copies) rows.push_back({copy.destination, copy.bytes});
  }
  return rows;
}

KvShards shards_of(const KvMemory& memory) {
  if (memory.shards()) return *memory.shards();
  const KvShape& shape = memory.layout().shape;
  return {.n_layers = shape.n_layers, .n_kv_heads = shape.n_kv_heads};
}

void Peers::add(PeerId peer, const KvLayout& layout, const KvShards& shards) {
  const KvShards own = shards_of(memory_);
  Peer known{layout, {}, map_shards(own, shards), map_shards(shards, own)};
  for (int rank = 0; rank < shards.n_ranks(); ++rank) {
    known.of_ranks.push_back(layout);
    known.of_ranks.back().shape = rank_shape(layout.shape, shards, rank);
  }
  known_[peer] = std::move(known);
}

std::vector<KvView> Peers::views(PeerId peer, const KvPlace& place) const {
  std::vector<KvView> views;
  const std::vector<KvLayout>& of_ranks = known_.at(peer).of_ranks;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank)
    views.push_back({transport_.remote(peer, int(rank)), &of_ranks[rank],
                     place.blocks.empty() ? nullptr : place.blocks.data(), place.slot});
  return views;
}

void Peers::plan_write(KvHandle kv, PeerId peer, const KvPlace& place, const KvRegion& region,
                       TransferPlan& plan) const {
  plan_sharded_transfer(known_.at(peer).to, views_of(memory_, kv), views(peer, place), region, plan);
}

void Peers::plan_read(PeerId peer, const KvPlace& place, KvHandle kv, const KvRegion& region,
                      TransferPlan& plan) const {
  plan_sharded_transfer(known_.at(peer).from, views(peer, place), views_of(memory_, kv), region, plan);
}

}  // namespace xpyd::disagg
