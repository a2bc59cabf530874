// Where the KV of one sequence is, said so that a peer can write or read there.
#pragma once

#include <vector>

#include "disagg/messages.h"

namespace xpyd {

// The bytes of tokens [token_begin, token_end), all layers, of every rank, in as few pieces as the
// layout allows: what a window opens.
std::vector<MemoryRange> rows_of(const KvMemory& memory, KvHandle kv, int token_begin,
                                 int token_end);
// What the peer is told: the blocks (or the slot) that lie behind the window.
KvPlace place_of(const KvMemory& memory, KvHandle kv, const WindowKey& window);
// A peer's place as transfer plans see it. `pool`: where the peer's region begins, as
// KvTransport::remote() says. Borrows from all three.
KvView view_at(std::byte* pool, const KvLayout& layout, const KvPlace& place);

}  // namespace xpyd
