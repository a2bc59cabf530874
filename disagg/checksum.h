// Checksums of KV that crosses between instances, end to end: computed from the sender's memory and
// again from the receiver's, whatever their layouts, block sizes and ranks, and the wire between.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "allocator/kv_layout.h"
#include "allocator/kv_shards.h"

namespace xpyd::disagg {

inline constexpr int kChecksumTokens = 64;

// XXH3-64 over the rows [layer][K|V][token][head] of each kChecksumTokens tokens from token_begin
// on. `views`: of each rank of `shards`; where several hold the same head, the `replica`th of them
// is read. Before: the CPU can read them.
std::vector<uint64_t> kv_checksums(std::span<const KvView> views, const KvShards& shards, int token_begin,
                                   int token_end, int replica = 0);

}  // namespace xpyd::disagg
