// KvShards: how the KV of one instance, layers x kv heads, lies on the ranks that compute it. Pipeline stages hold
// layers, the tensor-parallel ranks of a stage hold heads; each rank has its rectangle, in its part of one pool or
// (vattention) in a KV memory of its own. Whoever needs to know who holds what (memory, model, transfers) asks here.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/kv/kv_layout.h"
#include "base/status.h"

namespace xpyd::allocator {

struct KvRange {
  int begin = 0, end = 0;
  int size() const { return end - begin; }
  bool operator==(const KvRange&) const = default;
};
struct KvRect {  // in numbers of the whole model
  KvRange layers, heads;
  bool operator==(const KvRect&) const = default;
};

// Ranks are counted stage by stage: rank = stage * tp + tensor rank.
struct KvShards {
  int n_layers = 0, n_kv_heads = 0;
  int tp = 1, pp = 1;
  // n_layers % pp layers are left over: that many stages have one more, `long_stage` and those after it, beginning anew
  // after the last. -1: the last ones, which balances best where prompts are cut into chunks that cost more and more.
  int long_stage = -1;
  std::vector<int> stage_layers;  // [pp]: layers of each stage, instead of the rule; or empty
  bool operator==(const KvShards&) const = default;

  int n_ranks() const { return tp * pp; }
  int stage_of(int rank) const { return rank / tp; }
  int tensor_rank_of(int rank) const { return rank % tp; }
  // Tensor ranks that hold the same head: 1, or tp / n_kv_heads where there are more ranks than heads.
  int replicas() const { return tp > n_kv_heads ? tp / n_kv_heads : 1; }

  KvRange layers(int stage) const;
  KvRange heads(int tensor_rank) const;
  // Those of the tensor ranks that hold this head: the first of replicas() neighbours.
  int first_owner(int head) const;
  KvRect rect(int rank) const { return {layers(stage_of(rank)), heads(tensor_rank_of(rank))}; }
};

// Whether these numbers can be: each message says which is wrong, and calls tp and pp what
// `tp_name` and `pp_name` call them. Heads that tp does not divide are allowed (ranks then have one
// more or less), but heads that are copied must be copied equally often.
Status check_shards(const KvShards& shards, const std::string& tp_name = "tp", const std::string& pp_name = "pp");

// The part of `whole` that a rank keeps.
KvShape rank_shape(const KvShape& whole, const KvShards& shards, int rank);

// Where KV is. On one rank, or on several, where each has its part of the model's layers and heads at addresses of its
// own. Known when a memory is made, and the same until it ends.
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
