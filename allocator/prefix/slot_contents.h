// SlotContents records which tokens, under which salt, each slot of contiguous memory holds. This includes slots whose
// sequence has ended and that nobody has taken since. It finds the slot with the longest common prefix: prefix sharing
// for memory without blocks (after vTensor's and TurboMind's reuse of a whole sequence).
//
// Slots are few (in vattention twice the batch) and prompts are long, so there is no tree. A look-up compares the
// prompt with a slot only if their tokens agree at the end of the best match so far.
//
// Thread safety: any thread may call find(); the memory's thread calls the rest. The class has its own lock.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "allocator/prefix/prefix_cache.h"

namespace xpyd::allocator {

class SlotContents {
 public:
  // A shorter match is ignored, because every prompt of a tokenizer may begin with the same token.
  static constexpr int kLeast = 16;  // tokens

  struct Match {
    int slot = -1;
    int tokens = 0;
  };

  explicit SlotContents(int n_slots) : slots_(size_t(n_slots)) {}

  // A sequence with these written tokens takes the slot. Its previous contents are forgotten.
  void begin(int slot, std::span<const int32_t> tokens, uint64_t salt) {
    std::lock_guard lock(mutex_);
    at(slot) = {{tokens.begin(), tokens.end()}, salt, false};
  }
  void begin_like(int slot, int other) {  // with the contents of `other`
    std::lock_guard lock(mutex_);
    at(slot) = {at(other).tokens, at(other).salt, false};
  }
  void add(int slot, std::span<const int32_t> tokens) {
    std::lock_guard lock(mutex_);
    at(slot).tokens.insert(at(slot).tokens.end(), tokens.begin(), tokens.end());
  }
  void end(int slot) {  // the sequence has ended; others may take the slot
    std::lock_guard lock(mutex_);
    at(slot).ended = true;
  }
  void truncate(int slot, int tokens) {  // keeps at most that many tokens
    std::lock_guard lock(mutex_);
    at(slot).tokens.resize(std::min(at(slot).tokens.size(), size_t(tokens)));
  }
  void clear_idle() {
    std::lock_guard lock(mutex_);
    for (Slot& s : slots_)
      if (s.ended) s.tokens.clear();
  }
  int size(int slot) const {  // tokens
    std::lock_guard lock(mutex_);
    return int(slots_[size_t(slot)].tokens.size());
  }

  // Finds the slot with the longest common prefix, which never is all of `tokens`. Among equal matches it returns the
  // slot that would lose the fewest tokens if it were taken. `take`: it considers only slots that others may take and
  // of which the match keeps at least half. Taking another slot would lose more than it finds.
  Match find(std::span<const int32_t> tokens, uint64_t salt, bool take) const {
    if (tokens.empty()) return {};
    tokens = tokens.first(tokens.size() - 1);
    Match best;
    size_t found = kLeast, least_loss = 0;
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& s = slots_[i];
      const size_t n = std::min(s.tokens.size(), tokens.size());
      if (n < found || s.salt != salt || s.tokens[found - 1] != tokens[found - 1]) continue;
      if (take && !s.ended) continue;
      const size_t same = size_t(tokens_alike(s.tokens.data(), tokens.data(), int(n)));
      if (same < found || (take && 2 * same < s.tokens.size())) continue;
      const size_t loss = s.ended ? s.tokens.size() - same : size_t(INT_MAX);
      if (best.slot >= 0 && same == found && loss >= least_loss) continue;
      best = {int(i), int(same)};
      found = same;
      least_loss = loss;
    }
    return best;
  }

 private:
  struct Slot {
    std::vector<int32_t> tokens;
    uint64_t salt = 0;
    bool ended = false;
  };
  Slot& at(int slot) { return slots_[size_t(slot)]; }

  std::vector<Slot> slots_;
  mutable std::mutex mutex_;
};

}  // namespace xpyd::allocator
