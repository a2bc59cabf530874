// TransferPlan: which bytes cross from one instance's KV to another's. Layouts and block sizes may differ on the two
// sides; the result is a list of copies, coalesced as far as both layouts allow. Its length is the number of
// descriptors of the transfer: about 2 * layers * blocks for layer_major, blocks for token_major.
//
// Between ranks: which rank of one instance sends which rectangle of KV, layers x heads, to which rank of another
// whose shape may differ: P tp=a, pp=p to D tp=b, pp=q, for any of them, kv heads copied on either
// side (tp > kv heads; MLA, which has one) included.
//
// The plan follows from the two shapes alone: both sides compute it, and per request only block ids need to cross.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "allocator/kv_copy.h"
#include "allocator/kv_shards.h"

namespace xpyd::disagg {

struct TransferPlan {
  std::vector<Copy> copies;
  size_t bytes = 0;
};

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan);

// One rectangle from a source rank to a destination rank, in numbers of the whole model. Where the
// plan stripes tokens over replicas, it takes part `part` of `parts` of them.
struct ShardMove {
  int source_rank = 0, destination_rank = 0;
  KvRect rect;
  int part = 0, parts = 1;
};

// Which of the ranks that hold the same head sends it.
enum class ReplicaUse : uint8_t {
  spread,  // one of them to each destination, another to the next: every byte leaves from one place
  stripe,  // all of them, to every destination, a part of the tokens each: more links at once
};

struct ShardMap {
  KvShards source, destination;
  std::vector<ShardMove> moves;  // by destination rank, then layers, then heads, then part
};
// Before: both shapes pass check_shards and are of one model.
ShardMap map_shards(const KvShards& source, const KvShards& destination, ReplicaUse use = ReplicaUse::spread);

// The copies of a region of one sequence (tokens; layers in numbers of the whole model; heads are not looked at),
// between any of the ranks' regions. source[r], destination[r]: the sequence in the KV of rank r of either side.
void plan_sharded_transfer(const ShardMap& map, std::span<const KvView> source, std::span<const KvView> destination,
                           const KvRegion& region, TransferPlan& plan);

}  // namespace xpyd::disagg
