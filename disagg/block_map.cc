#include "disagg/block_map.h"

#include <algorithm>

namespace xpyd::disagg {

BlockMap map_blocks(std::span<const KvState> states, std::vector<std::pair<int32_t, uint64_t>> held) {
  BlockMap map;
  const size_t per_cell = std::max<size_t>(1, (states.size() + kMapCells - 1) / kMapCells);
  map.per_cell = int(per_cell);
  map.cells.resize((states.size() + per_cell - 1) / per_cell);
  for (size_t block = 0; block < states.size(); ++block) ++map.cells[block / per_cell][size_t(states[block])];
  std::sort(held.begin(), held.end());
  held.erase(std::unique(held.begin(), held.end()), held.end());
  for (auto& [block, request] : held) block /= int(per_cell);
  std::sort(held.begin(), held.end());  // by cell
  for (const auto& [cell, request] : held) {
    const bool same = !map.holders.empty() && map.holders.back().cell == cell && map.holders.back().request == request;
    if (!same && map.holders.size() == kMapHolders) break;
    if (!same) map.holders.push_back({cell, request, 0});
    ++map.holders.back().blocks;
  }
  return map;
}

}  // namespace xpyd::disagg
