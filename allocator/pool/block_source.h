// BlockSource: who has the blocks that nobody uses here, and whom a BlockPool gives back what it
// does not need. Of a pool of one process that is a list of free blocks; where processes share the
// blocks (block_ledger.h), what nobody holds here may be somebody else's.
//
// Thread safety: the pool's lock.
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
  // Appends up to n blocks that nobody held; gives their number.
  virtual int claim(int n, std::vector<int32_t>& out) = 0;
  virtual void release(int32_t block) = 0;  // before: held here
  virtual int count_free() const = 0;
  // Aborts unless the blocks that are held here are those marked, [n_blocks].
  virtual void check_invariants(std::span<const char> held) const = 0;

  // Of a pool that processes share:
  virtual int member() const { return -1; }  // the number of this one among them
  virtual uint32_t generation(int32_t) const { return 0; }
  // A block held here that is used anew: others hold it, too, and it gives no room (false) …
  virtual bool alone(int32_t) const { return true; }
  // … which may come true until this: false, and it is held here no more.
  [[nodiscard]] virtual bool recycle(int32_t) { return true; }
  // Held here, too, from now on (or before). False: it is not what `giver` held in that generation.
  [[nodiscard]] virtual bool share(int32_t /*block*/, uint32_t /*generation*/, int /*giver*/) { return false; }
};

// Free blocks, the last freed first; at the beginning in ascending order, so that runs coalesce.
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
  std::vector<int32_t> free_;  // the next one last
};

}  // namespace xpyd::allocator
