// KvShards: how the KV of one instance, layers x kv heads, is divided among the ranks that compute it. A pipeline stage
// holds layers, and the tensor-parallel ranks of a stage hold heads. Each rank holds a rectangle, in its own part of
// the pool. Memory, model and transfers all ask this struct who holds what.
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
struct KvRect {  // in the model's layer and head numbers
  KvRange layers, heads;
  bool operator==(const KvRect&) const = default;
};

// Ranks are counted stage by stage: rank = stage * tp + tensor rank.
struct KvShards {
  int n_layers = 0, n_kv_heads = 0;
  // If pp does not divide n_layers, the last n_layers % pp stages have one layer more. This balances best if prompts
  // are cut into chunks, whose cost grows along the prompt.
  int tp = 1, pp = 1;
  bool operator==(const KvShards&) const = default;

  int n_ranks() const { return tp * pp; }
  int stage_of(int rank) const { return rank / tp; }
  int tensor_rank_of(int rank) const { return rank % tp; }
  // The number of tensor ranks that hold the same head: 1, or tp / n_kv_heads if tp exceeds n_kv_heads.
  int replicas() const { return tp > n_kv_heads ? tp / n_kv_heads : 1; }

  KvRange layers(int stage) const;
  KvRange heads(int tensor_rank) const;
  // The first of the replicas() adjacent tensor ranks that hold this head.
  int first_owner(int head) const;
  KvRect rect(int rank) const { return {layers(stage_of(rank)), heads(tensor_rank_of(rank))}; }
};

// Returns an error if the numbers are impossible. The message says which one is wrong, and calls tp and pp by `tp_name`
// and `pp_name`. tp need not divide the heads: some ranks then have one head more. If heads are replicated, all must be
// replicated equally often.
Status check_shards(const KvShards& shards, const std::string& tp_name = "tp", const std::string& pp_name = "pp");

// The part of `whole` that a rank keeps.
KvShape rank_shape(const KvShape& whole, const KvShards& shards, int rank);

// The memory in which KV lies: of one rank, or of several, each with its part of the model's layers and heads at its
// own addresses. It is fixed when a KvMemory is made.
struct KvPlaces {
  struct Place {
    KvLayout layout;                    // of the rank's shape
    std::shared_ptr<std::byte> memory;  // [layout.pool_bytes()]
  };
  KvLayout whole;                  // the layout on one rank; with several ranks, no memory has these addresses
  std::vector<Place> ranks;        // [n_ranks]
  std::optional<KvShards> shards;  // empty: one rank

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
  // Bytes of one token on all ranks. This is more than `whole` says if several ranks hold the same heads.
  size_t token_bytes() const {
    size_t bytes = 0;
    for (const Place& place : ranks) bytes += place.layout.shape.token_bytes();
    return bytes;
  }
};

}  // namespace xpyd::allocator
