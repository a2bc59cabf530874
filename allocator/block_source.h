// BlockSource: who has the blocks that nobody uses here, and whom a BlockPool gives back what it
// does not need. Of a pool of one process that is a list of free blocks; where processes share the
// blocks (block_ledger.h), what nobody holds here may be somebody else's.
//
// Thread safety: the pool's lock.
#pragma once

#include <climits>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace xpyd::allocator {

class BlockLedger;

class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Appends up to n blocks that nobody held.
  virtual void claim(int n, std::vector<int32_t>& out) = 0;
  virtual void release(int32_t block) = 0;  // before: held here
  virtual int count_free() const = 0;
  // Aborts unless the blocks that are held here are those marked, [n_blocks].
  virtual void check_invariants(std::span<const char> held) const = 0;
  // Of all that is held here, cached blocks may be among so many: beyond, they go.
  virtual int share() const { return INT_MAX; }

  // Of a pool that processes share:
  virtual int member() const { return -1; }  // the number of this one among them
  virtual uint32_t generation(int32_t) const { return 0; }
  // A block held here that is used anew: others hold it, too, and it gives no room (false) …
  virtual bool alone(int32_t) const { return true; }
  // … which may come true until this: false, and it is held here no more.
  [[nodiscard]] virtual bool recycle(int32_t) { return true; }
  // Held here, too, from now on. False: it is not what `giver` held in that generation.
  [[nodiscard]] virtual bool adopt(int32_t, uint32_t generation, int giver) {
    (void)generation, (void)giver;
    return false;
  }
};

// Free blocks, the last freed first; at the beginning in ascending order, so that runs coalesce.
std::unique_ptr<BlockSource> make_free_list(int n_blocks);
// `share`: of the blocks, what this process may hold with cached ones among it.
std::unique_ptr<BlockSource> make_ledger_source(std::unique_ptr<BlockLedger> ledger, int share);

}  // namespace xpyd::allocator
