// Where the blocks of one instance's memory are, for who looks at the server's page: a map of at most kMapCells cells,
// each of several neighbours, and which requests' sequences are in them.
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
    int blocks = 0;  // of the cell; one that two requests share counts for both
  };
  double t = 0;                                   // Clock: when it was so
  int per_cell = 1;                               // blocks; the last cell may have fewer
  std::vector<std::array<int, kKvStates>> cells;  // blocks by KvState
  std::vector<Holder> holders;                    // by cell, then request; the first kMapHolders
};

// `held`: a block and a request that holds it, in any order, any number of times.
BlockMap map_blocks(std::span<const KvState> states, std::vector<std::pair<int32_t, uint64_t>> held);

}  // namespace xpyd::disagg
