// Where the KV of one sequence is, said so that a peer can write or read there.
#pragma once

#include <vector>

#include "allocator/kv_memory.h"
#include "disagg/messages.h"
#include "disagg/transfer_plan.h"

namespace xpyd::disagg {

// The bytes of tokens [token_begin, token_end), all layers, of every rank, in as few pieces as the
// layout allows: what a window opens.
inline std::vector<MemoryRange> rows_of(const KvMemory& memory, KvHandle kv, int token_begin, int token_end) {
  std::vector<MemoryRange> rows;
  TransferPlan plan;
  for (int rank = 0; rank < memory.n_ranks(); ++rank) {
    const KvView view = memory.view(kv, rank);
    plan_transfer(view, view, {token_begin, token_end, 0, view.layout->shape.n_layers}, plan);
    for (const Copy& copy : plan.copies) rows.push_back({copy.destination, copy.bytes});
  }
  return rows;
}

// What the peer is told: the blocks, or the slot, that lie behind the window.
inline KvPlace place_of(const KvMemory& memory, KvHandle kv, const WindowKey& window, int cached_tokens) {
  const KvView view = memory.view(kv);
  KvPlace place{.window = window, .slot = view.slot, .cached_tokens = cached_tokens};
  const auto blocks = memory.blocks(kv);
  if (!view.contiguous()) place.blocks.assign(blocks.begin(), blocks.end());
  return place;
}

}  // namespace xpyd::disagg
