// A map of an instance's KV blocks for the server's status page. It has at most kMapCells cells. A cell covers several
// adjacent blocks, and the map tells which requests hold blocks of it.
//
// Thread safety: plain values.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "allocator/kv_memory.h"

namespace xpyd::disagg {

inline constexpr int kMapCells = 1024;
inline constexpr size_t kMapHolders = 4 * kMapCells;

struct BlockMap {
  struct Holder {
    int cell = 0;
    uint64_t request = 0;
    int blocks = 0;  // blocks of the cell that the request holds; a shared block counts for each request
  };
  double t = 0;                                   // Clock: when the map was drawn
  int per_cell = 1;                               // blocks of a cell; the last one may have fewer
  std::vector<std::array<int, kKvStates>> cells;  // number of blocks by KvState
  std::vector<Holder> holders;                    // sorted by cell, then request; the first kMapHolders
};

// Makes the map. `held` has pairs of a block and a request that holds it, in any order; repetitions do not matter.
BlockMap map_blocks(std::span<const KvState> states, std::vector<std::pair<int32_t, uint64_t>> held);

}  // namespace xpyd::disagg
