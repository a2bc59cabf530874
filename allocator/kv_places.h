// KvPlaces: where KV is. On one rank, or on several (kv_shards.h), where each has its part of the model's layers and
// heads at addresses of its own. Known when a memory is made, and the same until it ends.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "allocator/kv_layout.h"
#include "allocator/kv_shards.h"

namespace xpyd::allocator {

struct KvPlaces {
  struct Place {
    KvLayout layout;                    // of the rank's shape
    std::shared_ptr<std::byte> memory;  // [layout.pool_bytes()]
  };
  KvLayout whole;                  // as one rank would have it; of several its addresses are nobody's
  std::vector<Place> ranks;        // [n_ranks]
  std::optional<KvShards> shards;  // nothing: one rank

  KvPlaces(const KvLayout& layout, std::shared_ptr<std::byte> memory)
      : whole(layout), ranks{{layout, std::move(memory)}} {}
  KvPlaces(const KvLayout& layout, const KvShards& cut, std::vector<std::shared_ptr<std::byte>> memories)
      : whole(layout) {
    XPYD_CHECK(int(memories.size()) == cut.n_ranks());
    if (cut.n_ranks() > 1) shards = cut;
    for (int rank = 0; rank < cut.n_ranks(); ++rank) {
      KvLayout own = layout;
      if (shards) own.shape = rank_shape(layout.shape, cut, rank);
      ranks.push_back({own, std::move(memories[size_t(rank)])});
    }
  }

  std::byte* base(int rank) const { return ranks[size_t(rank)].memory.get(); }
  const KvLayout& layout(int rank) const { return ranks[size_t(rank)].layout; }
  // Bytes of one token on all ranks: more than `whole` says where some hold the same heads.
  size_t token_bytes() const {
    size_t bytes = 0;
    for (const Place& place : ranks) bytes += place.layout.shape.token_bytes();
    return bytes;
  }
};

}  // namespace xpyd::allocator
