// BlockSource: where a BlockPool takes unused blocks, and where it gives them back. A pool of one process has a free
// list. If processes share the blocks (block_ledger.h), a block that this process does not hold may be held by another.
//
// Thread safety: called under the pool's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace xpyd::allocator {

class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Appends to `out` up to n blocks that nobody held, and returns their number.
  virtual int claim(int n, std::vector<int32_t>& out) = 0;
  virtual void release(int32_t block) = 0;  // requires: held here
  virtual int count_free() const = 0;
  // Aborts unless exactly the marked blocks ([n_blocks]) are held here.
  virtual void check_invariants(std::span<const char> held) const = 0;

  // For a pool that processes share:
  virtual int member() const { return -1; }  // this process's number among them
  virtual uint32_t generation(int32_t) const { return 0; }
  // True if nobody else holds `block`, which is held here. Only then can its memory be used anew.
  virtual bool alone(int32_t) const { return true; }
  // Makes `block` new again. False: another process has shared it since alone(); it is then held here no more.
  [[nodiscard]] virtual bool recycle(int32_t) { return true; }
  // Holds `block` here too, if it is not held yet. False: `giver` does not hold it in that generation any more.
  [[nodiscard]] virtual bool share(int32_t /*block*/, uint32_t /*generation*/, int /*giver*/) { return false; }
};

// A list of free blocks. The last one freed goes out first; a new list is in ascending order, so that copies join.
class FreeList final : public BlockSource {
 public:
  explicit FreeList(int n_blocks) : free_(size_t(n_blocks)) {
    for (int i = 0; i < n_blocks; ++i) free_[size_t(i)] = n_blocks - 1 - i;
  }
  int claim(int n, std::vector<int32_t>& out) override {
    const size_t keep = free_.size() - std::min(free_.size(), size_t(n));
    out.insert(out.end(), free_.rbegin(), free_.rend() - ptrdiff_t(keep));
    const int claimed = int(free_.size() - keep);
    free_.resize(keep);
    return claimed;
  }
  void release(int32_t block) override { free_.push_back(block); }
  int count_free() const override { return int(free_.size()); }
  void check_invariants(std::span<const char> held) const override {
    std::vector<char> free(held.size(), 0);
    for (int32_t block : free_) XPYD_CHECK(!free[size_t(block)]++, "free list");
    for (size_t block = 0; block < held.size(); ++block) XPYD_CHECK(free[block] != held[block]);
  }

 private:
  std::vector<int32_t> free_;  // the next one to go out is at the end
};

}  // namespace xpyd::allocator
