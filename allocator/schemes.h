// What a pool of given options would be, before anything is allocated: for option checks and `xpyd info`; and the pool.
//
// An instance on several ranks (kv_shards.h) has one pool: a sequence has the same blocks, or the
// same slot, and the same cached tokens on each, so that there is one block table, and everything
// above sees one memory. A block has its bytes on every rank (KvPlaces), each of its rank's shape.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "allocator/kv/kv_layout.h"
#include "allocator/kv_memory.h"
#include "base/status.h"

namespace xpyd::allocator {

// Of one rank: the layout of make_block_pool(scheme, options), or what is wrong with the options: a
// pool too small for one block is told how many bytes a block needs.
Result<KvLayout> plan_pool(const std::string& scheme, const KvOptions& options);

// Of an instance. `options` are of all of it: the model's shape, and the bytes of all ranks together, which get equally
// many blocks. Errors name the option that cannot be met, as plan_pool()'s do.
struct PoolPlan {
  KvLayout whole;                   // of the blocks as one rank would have them
  std::vector<KvOptions> of_ranks;  // [n_ranks]
  KvShards shards;
};
Result<PoolPlan> plan_ranks(const std::string& scheme, const KvOptions& options, const KvShards& shards);

// The pool, from which several memories can draw. Its bytes are allocated and touched here. Before:
// the plan can be made. Error `unavailable`: the device has not that much memory.
Result<std::shared_ptr<KvPool>> make_ranked_pool(const std::string& scheme, const KvOptions& options,
                                                 const KvShards& shards);
// A memory over a pool of its own.
Result<std::unique_ptr<KvMemory>> make_ranked_memory(const std::string& scheme, const KvOptions& options,
                                                     const KvShards& shards);

// Memory that a pool takes beside its pool_bytes: block states, prefix index.
size_t pool_metadata_bytes(const KvLayout& layout, bool prefix_cache);

}  // namespace xpyd::allocator
