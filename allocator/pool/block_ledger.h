// BlockLedger: records which processes hold which blocks of a pool in shared memory. It has one 64-bit word per block:
// a generation, and one bit for each member that holds the block.
//
//   claim    {g, nobody}        -> {g + 1, me}       the block is mine, and new
//   share    {g, giver ...}     -> {g, giver, me...} only if g and the giver are still those of the hand-over
//   recycle  {g, me}            -> {g + 1, me}       the block is mine alone, and new again
//   release  {g, me ...}        -> {g, ...}
//
// Each operation is one compare-and-swap, so every state of the ledger is consistent and a member can be killed at any
// instruction. A block and its generation identify a content: once a member has given the block up, or uses it for
// something else, the word differs.
//
// A member is alive while the kernel holds its lock on byte `slot` of the file. The lock belongs to the member's own
// open file description (F_OFD_SETLK), and ends at the latest with the member's process, after its last thread has
// stopped writing. Its card may still write until the driver's files are closed, in no known order. So a member that
// can lock another's byte gives back that one's blocks only when a pidfd says that the process has ended. A stopped
// process keeps its blocks, because it may continue and write to them.
//
// No operation follows a pointer or waits for another process, except join(), which waits for a process that is ending.
//
// Thread safety: any thread. A child process must not inherit a member, because its lock would live on.
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

  // Takes the first free member slot; an observer holds no blocks and needs none. `memory`: bytes(n_blocks) that all
  // members have mapped, zeroed when it was made, aligned to a cache line. `file`: any file that all members have open.
  // It is opened once more, through /proc, and its bytes [0, kMembers) are locked, whatever they contain. Errors:
  // `unavailable`, there are kMembers already; `io`.
  enum class As { member, observer };
  static Result<std::unique_ptr<BlockLedger>> join(std::shared_ptr<std::byte> memory, int n_blocks, int file, As as);
  ~BlockLedger() override;  // gives back what this member holds

  int n_blocks() const { return n_blocks_; }
  int member() const override { return slot_; }  // -1: an observer

  // Takes free blocks in ascending order from where the last claim ended. If there are too few, it first gives back
  // what dead members held.
  int claim(int n, std::vector<int32_t>& out) override;
  [[nodiscard]] bool share(int32_t block, uint32_t generation, int giver) override;
  [[nodiscard]] bool recycle(int32_t block) override;
  void release(int32_t block) override;
  bool alone(int32_t block) const override { return holders(block) == bit(slot_); }

  uint32_t generation(int32_t block) const override { return uint32_t(load(block) >> 32); }
  uint32_t holders(int32_t block) const { return uint32_t(load(block)); }  // bit: slot
  bool holds(int32_t block) const { return (holders(block) & bit(slot_)) != 0; }

  int count_free() const override;  // reads every word, but only after a change
  void check_invariants(std::span<const char> held) const override;
  // Increases after every change, so a count is valid while it stays the same. The last change of a killed member may
  // be missing until the next change.
  uint64_t changes() const;

  // Gives back what dead members held, and returns how many such members there were.
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
  std::atomic<int32_t> next_{0};  // where the next claim starts
  std::mutex reaping_;            // because locks through one open file do not exclude each other
  mutable std::mutex counting_;
  mutable uint64_t counted_at_ = ~uint64_t{0};  // changes() at the last count
  mutable int free_ = 0;                        // free blocks by that count
};

}  // namespace xpyd::allocator
