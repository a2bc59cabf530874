// Which instances hold which blocks, in their prefix caches and in the tiers below, as they report it. It may be late,
// which costs time: a prompt goes where its prefix is no more, and is computed there. One walk over a prompt's blocks
// finds what every instance has of it, whatever their number.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "allocator/prefix/prefix_index.h"
#include "base/memory.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

// Chained hashes of one prompt's full blocks, for each size of block that is asked for.
class PromptHashes {
 public:
  PromptHashes(std::span<const int32_t> tokens, uint64_t salt) : tokens_(tokens), salt_(salt) {}
  std::span<const int32_t> tokens() const { return tokens_; }
  uint64_t salt() const { return salt_; }
  // Not of the block with the last token, whose logits are wanted.
  std::span<const uint64_t> of(int block_tokens) {
    auto [at, fresh] = hashes_.try_emplace(block_tokens);
    if (fresh && !tokens_.empty()) at->second = prefix_hashes(tokens_.first(tokens_.size() - 1), block_tokens, salt_);
    return at->second;
  }

 private:
  const std::span<const int32_t> tokens_;
  const uint64_t salt_;
  std::map<int, std::vector<uint64_t>> hashes_;
};

// Instances by small numbers: each has one from joined() to left(). A block takes 12 bytes of a table that is 3/8 to
// 3/4 full, 16 to 32 in all; another 4 for each of its holders where it has several. (The table doubles by being filled
// anew: 2 s where it has 50 million blocks.)
class CacheDirectory {
 public:
  // Of a prompt, what one instance has from the first block on, in blocks.
  struct Hit {
    int device = 0;  // in its prefix cache
    int host = 0;    // there, or in its host tier
    int all = 0;     // … or on its disk
  };
  CacheDirectory();
  // It has no more blocks than that, in its pool and in its tiers; nor more than kMost, whatever it says.
  int joined(int capacity_blocks, int tier_blocks = 0);
  void left(int instance);
  void heard(int instance, const CacheReport& report);
  // [instance], valid until the next call.
  std::span<const Hit> find(std::span<const uint64_t> hashes);
  size_t blocks(int instance) const { return instances_[size_t(instance)].blocks; }
  size_t bytes() const;

 private:
  static constexpr size_t kMost = size_t{1} << 22;
  static constexpr uint32_t kMany = 1u << 31;
  struct Held {
    size_t capacity = 0, blocks = 0;
    bool there = false;
  };
  // One of a block's holders: its number, and bits of the tiers where it has it.
  static constexpr uint32_t holder(int instance, uint32_t tiers) { return uint32_t(instance) | tiers << 16; }
  static constexpr int instance_of(uint32_t holder) { return int(holder & 0xffff); }
  static constexpr uint32_t tiers_of(uint32_t holder) { return holder >> 16; }

  // One block: 12 bytes.
  class Slot {
   public:
    uint64_t key() const { return uint64_t(high_) << 32 | low_; }  // 0: a free place
    void set(uint64_t key, uint32_t who) { low_ = uint32_t(key), high_ = uint32_t(key >> 32), holders = who; }
    uint32_t holders = 0;  // one, or kMany and which of many_

   private:
    uint32_t low_ = 0, high_ = 0;
  };

  static uint64_t key_of(uint64_t hash) { return hash == 0 ? 1 : hash; }
  size_t place_of(uint64_t key) const { return size_t(key * 0x9e3779b97f4a7c15u >> shift_); }
  size_t find_place(uint64_t key) const;
  std::span<uint32_t> holders_at(size_t place);
  void grow();
  void stored(int instance, uint64_t key, uint32_t tier);
  void removed(int instance, size_t place, uint32_t tiers);
  void erase(size_t place);

  std::vector<Held> instances_;
  // Open addressing with linear probing.
  int shift_ = 64;
  size_t used_ = 0;
  Buffer memory_;  // in huge pages, where the system grants them: a look-up is places that are nowhere near each other
  std::span<Slot> slots_;
  std::vector<std::vector<uint32_t>> many_;  // two holders at least; or unused
  std::vector<uint32_t> unused_;             // of many_
  std::vector<Hit> found_;                   // of the last prompt
  std::vector<int> first_;                   // who has its first block: all others' are 0
};

}  // namespace xpyd::disagg
