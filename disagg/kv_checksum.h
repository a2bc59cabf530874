// Checksums of KV, block by block, the same on both sides of a transfer whatever their layouts.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/kv_layout.h"

namespace xpyd {

// XXH3 of tokens [0, block_tokens), [block_tokens, 2 * block_tokens), … of the first `tokens`
// tokens of a sequence: of their rows by layer, K before V, token, head. `block_tokens` is the
// reader's grain, not the layout's; the last block may be shorter.
std::vector<uint64_t> kv_checksums(const KvView& view, int tokens, int block_tokens);

}  // namespace xpyd
