// BlockLedger: which processes hold which blocks of a pool in shared memory. One 64-bit word per
// block: a generation, and one bit per member for those who hold it.
//
//   claim    {g, nobody}        -> {g + 1, me}       the block is mine, and new
//   share    {g, giver ...}     -> {g, giver, me...} only if g and the giver are as I was told
//   recycle  {g, me}            -> {g + 1, me}       mine alone, and new again
//   release  {g, me ...}        -> {g, ...}
//
// Each is one compare-and-swap, so every state of the ledger is one that may stay: a member can be
// killed at any instruction. Whoever names a block with its generation names its content, too: a
// member that has given it up, or uses it for something else, has left the word different.
//
// A member is alive as long as the kernel holds its lock: byte `slot` of the file, locked through an open file
// description of the member's own (F_OFD_SETLK), which ends with its process at the latest, after its last thread has
// stopped writing. Its card may go on until the driver's files are closed too, in no known order: so who can lock the
// byte of a member gives back what it held once its process has ended (a pidfd says so). A stopped process keeps its
// blocks: it may go on and write to them.
//
// Nothing here follows a pointer, or waits for another process, but join() for one that is ending.
//
// Thread safety: any thread. A child process must not inherit a member (its lock would live on).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "allocator/pool/block_source.h"
#include "base/os.h"

namespace xpyd::allocator {

class BlockLedger final : public BlockSource {
 public:
  static constexpr int kMembers = 32;
  static size_t bytes(int n_blocks);

  // `memory`: bytes(n_blocks) that all members have mapped, zeroed when made, aligned to a cache
  // line. `file`: any open file that all members have; it is opened once more, through /proc, and
  // bytes [0, kMembers) of it are locked, whatever they contain.
  // An observer holds no blocks. Errors: `unavailable`, kMembers are there; `io`.
  enum class As { member, observer };
  static Result<std::unique_ptr<BlockLedger>> join(std::shared_ptr<std::byte> memory, int n_blocks, int file, As as);
  ~BlockLedger() override;  // gives back what this member holds

  int n_blocks() const { return n_blocks_; }
  int member() const override { return slot_; }  // -1: an observer

  // In ascending order from where the last claim ended. Where there are fewer, what dead members held is given back
  // first.
  int claim(int n, std::vector<int32_t>& out) override;
  [[nodiscard]] bool share(int32_t block, uint32_t generation, int giver) override;
  [[nodiscard]] bool recycle(int32_t block) override;
  void release(int32_t block) override;
  bool alone(int32_t block) const override { return holders(block) == bit(slot_); }

  uint32_t generation(int32_t block) const override { return uint32_t(load(block) >> 32); }
  uint32_t holders(int32_t block) const { return uint32_t(load(block)); }  // bit: slot
  bool holds(int32_t block) const { return (holders(block) & bit(slot_)) != 0; }

  int count_free() const override;  // looks at every word, again only where something has changed
  void check_invariants(std::span<const char> held) const override;
  // Moves on after every change: a count is still right if it has not. (It may miss the last change
  // of a member that was killed, until the next one.)
  uint64_t changes() const;

  // Gives back what dead members held; how many there were.
  int reap();

 private:
  struct Header;
  BlockLedger(std::shared_ptr<std::byte> memory, int n_blocks, Fd lock_file);
  static uint64_t bit(int slot) { return uint64_t{1} << slot; }
  uint64_t* words() const;
  std::atomic_ref<uint64_t> word(int32_t block) const;
  uint64_t load(int32_t block) const { return word(block).load(std::memory_order_acquire); }
  int claim_free(int n, std::vector<int32_t>& out);
  bool lock(int slot);
  void unlock(int slot);
  bool ended(int slot, int wait_ms);
  void clear(int slot);
  void changed();
  Header& header() const;

  const std::shared_ptr<std::byte> memory_;
  const int n_blocks_;
  const Fd lock_file_;
  int slot_ = -1;
  std::atomic<int32_t> next_{0};  // where the next claim looks first
  std::mutex reaping_;            // locks of one open file do not exclude each other
  mutable std::mutex counting_;
  mutable uint64_t counted_at_ = ~uint64_t{0};  // changes() when
  mutable int free_ = 0;                        // blocks were so many
};

}  // namespace xpyd::allocator
