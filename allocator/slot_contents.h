// What the slots of contiguous memory hold: the token ids, and the salt, whose KV is there; of sequences that live, and
// of those that have ended while nobody has taken their slot. Finds the slot with the longest common prefix: sharing
// for memory without blocks (reference: vTensor's and TurboMind's reuse of a whole sequence).
//
// Slots are few (twice the batch) and prompts long, so there is no tree: a look-up compares the
// prompt with each slot whose token at the end of the best match so far is the right one.
//
// Thread safety: find() by any thread; the rest by the memory's own. Locks for itself.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace xpyd::allocator {

class SlotContents {
 public:
  // A shorter match is none: every prompt of a tokenizer begins with the same token.
  static constexpr int kLeast = 16;  // tokens

  struct Match {
    int slot = -1;
    int tokens = 0;
  };

  explicit SlotContents(int n_slots) : slots_(size_t(n_slots)) {}

  // A sequence with these written tokens has the slot now; what was there is forgotten.
  void begin(int slot, std::span<const int32_t> tokens, uint64_t salt);
  void begin_like(int slot, int other);  // with what the other holds
  void add(int slot, std::span<const int32_t> tokens);
  void end(int slot);                   // the sequence has ended: others may take the slot
  void truncate(int slot, int tokens);  // only that many are left, if there were more
  void clear_idle();

  int size(int slot) const;       // tokens
  bool takeable(int slot) const;  // it has ended and left some
  // The longest common prefix, but never all of `tokens`; of equals the slot that would lose the
  // least if it were taken. `take`: only slots that others may take, and that keep at least half of
  // what they hold: with less, more is lost than is found.
  Match find(std::span<const int32_t> tokens, uint64_t salt, bool take) const;

 private:
  struct Slot {
    std::vector<int32_t> tokens;
    uint64_t salt = 0;
    bool ended = false;
  };
  std::vector<Slot> slots_;
  mutable std::mutex mutex_;
};

}  // namespace xpyd::allocator
