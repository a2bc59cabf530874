// What a pool of given options would be, before anything is allocated: for option checks and `xpyd
// info`.
#pragma once

#include <string>

#include "allocator/kv_layout.h"
#include "allocator/kv_memory.h"
#include "base/status.h"

namespace xpyd {

// The layout of make_block_pool(scheme, options), or what is wrong with the options: a pool too
// small for one block is told how many bytes a block needs.
Result<KvLayout> plan_pool(const std::string& scheme, const KvOptions& options);

// Memory that a pool takes beside its pool_bytes: block states, prefix index.
size_t pool_metadata_bytes(const KvLayout& layout, bool prefix_cache);

}  // namespace xpyd
