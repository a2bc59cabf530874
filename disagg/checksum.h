// Checksums of KV that crosses between instances, end to end: computed from the sender's memory and
// again from the receiver's, whatever their layouts, block sizes and the wire between them.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/kv_layout.h"

namespace xpyd {

// XXH3-64 over the rows [layer][K|V][token][head] of each run of up to 64 tokens from token_begin on.
// Before: the rows can be read by the CPU.
std::vector<uint64_t> kv_checksums(const KvView& view, int token_begin, int token_end);

}  // namespace xpyd
