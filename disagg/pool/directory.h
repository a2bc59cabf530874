// The directory of which instance holds which block, in its prefix cache or an offload tier, as instances report it. A
// late report costs only time: a prompt is placed where its prefix is gone, and is computed there. One pass over a
// prompt's blocks finds the hit of every instance.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "allocator/prefix/prefix_hash.h"
#include "base/memory.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

// The chained hashes of a prompt's full blocks, computed once for each block size.
class PromptHashes {
 public:
  PromptHashes(std::span<const int32_t> tokens, uint64_t salt) : tokens_(tokens), salt_(salt) {}
  std::span<const int32_t> tokens() const { return tokens_; }
  uint64_t salt() const { return salt_; }
  // Without the block of the last token, because its logits must be computed.
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

// Instances have small numbers, valid from joined() to left(). A block takes 12 bytes in a table that is 3/8 to 3/4
// full, so 16 to 32 bytes. A block with several holders takes 4 more bytes for each. (Growing rehashes the table: 2 s
// for 50 million blocks.)
class CacheDirectory {
 public:
  // The prefix of a prompt that one instance has, in blocks from the first one on.
  struct Hit {
    int device = 0;  // blocks in its prefix cache
    int host = 0;    // … there or in its host tier
    int all = 0;     // … there or on its disk
  };
  CacheDirectory();
  // Adds an instance and returns its number. It gets at most these many entries, and never more than kMost, whatever it
  // reports.
  int joined(int capacity_blocks, int tier_blocks = 0);
  void left(int instance);  // removes the instance from all its blocks
  // Applies a report: first its removed blocks, then its stored ones.
  void heard(int instance, const CacheReport& report);
  // Returns a hit for each instance number. It is valid until the next call.
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
  // A holder of a block: its number, and a bit for each Tier that has the block.
  static constexpr uint32_t holder(int instance, uint32_t tiers) { return uint32_t(instance) | tiers << 16; }
  static constexpr int instance_of(uint32_t holder) { return int(holder & 0xffff); }
  static constexpr uint32_t tiers_of(uint32_t holder) { return holder >> 16; }

  // A table entry of 12 bytes.
  class Slot {
   public:
    uint64_t key() const { return uint64_t(high_) << 32 | low_; }  // 0: empty
    void set(uint64_t key, uint32_t who) { low_ = uint32_t(key), high_ = uint32_t(key >> 32), holders = who; }
    uint32_t holders = 0;  // a holder, or kMany and an index of many_

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
  Buffer memory_;  // in huge pages if possible, because look-ups are scattered
  std::span<Slot> slots_;
  std::vector<std::vector<uint32_t>> many_;  // at least two holders each, or unused
  std::vector<uint32_t> unused_;             // indices of many_
  std::vector<Hit> found_;                   // of the last prompt
  std::vector<int> first_;                   // holders of its first block; all others have 0
};

}  // namespace xpyd::disagg
