// Plans a pool from options before anything is allocated, for option checks and `xpyd info`, and makes the pool.
//
// An instance on several ranks (kv_shards.h) has one pool. A sequence has the same blocks or the same slot, and the
// same cached tokens, on every rank. So there is one block table, and everything above sees one memory. A block has its
// bytes on every rank (KvPlaces), in the shape of that rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "allocator/kv/kv_layout.h"
#include "allocator/kv_memory.h"
#include "base/status.h"

namespace xpyd::allocator {

// Plans the pool of one rank: returns the layout of make_block_pool(scheme, options), or what is wrong with the
// options. If the pool is too small for one block, the error says how many bytes a block needs.
Result<KvLayout> plan_pool(const std::string& scheme, const KvOptions& options);

// A plan for an instance. `options` describe all of it: the model's shape, and the bytes of all ranks together. All
// ranks get equally many blocks. Errors name the option that cannot be met, as those of plan_pool() do.
struct PoolPlan {
  KvLayout whole;                   // layout of the blocks as one rank would have them
  std::vector<KvOptions> of_ranks;  // [n_ranks]
  KvShards shards;
};
Result<PoolPlan> plan_ranks(const std::string& scheme, const KvOptions& options, const KvShards& shards);

// Makes the pool, from which several memories can draw. Allocates and touches its bytes. Requires: plan_ranks()
// succeeds. Error `unavailable`: the device has not that much memory.
Result<std::shared_ptr<KvPool>> make_ranked_pool(const std::string& scheme, const KvOptions& options,
                                                 const KvShards& shards);
// Makes a memory with a pool of its own.
Result<std::unique_ptr<KvMemory>> make_ranked_memory(const std::string& scheme, const KvOptions& options,
                                                     const KvShards& shards);

}  // namespace xpyd::allocator
