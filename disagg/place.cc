#include "disagg/place.h"

namespace xpyd {

std::vector<MemoryRange> rows_of(const KvMemory& memory, KvHandle kv, int token_begin,
                                 int token_end) {
  std::vector<MemoryRange> rows;
  TransferPlan plan;
  for (int rank = 0; rank < memory.n_ranks(); ++rank) {
    const KvView view = memory.rank_view(kv, rank);
    plan_transfer(view, view, {token_begin, token_end, 0, view.layout->shape.n_layers}, plan);
    for (const Copy& copy : plan.copies) rows.push_back({copy.destination, copy.bytes});
  }
  return rows;
}

KvPlace place_of(const KvMemory& memory, KvHandle kv, const WindowKey& window) {
  const KvView view = memory.view(kv);
  KvPlace place{.window = window, .slot = view.slot};
  const auto blocks = memory.blocks(kv);
  if (!view.contiguous()) place.blocks.assign(blocks.begin(), blocks.end());
  return place;
}

KvView view_at(std::byte* pool, const KvLayout& layout, const KvPlace& place) {
  return {pool, &layout, place.blocks.empty() ? nullptr : place.blocks.data(), place.slot};
}

}  // namespace xpyd
