// The directory of which instance holds which block, in its prefix cache or an offload tier, as instances report it. A
// late report costs only time: a prompt is placed where its prefix is gone, and is computed there. One pass over a
// prompt's blocks finds the hit of every instance.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "allocator/prefix/prefix_hash.h"
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

// Instances have small numbers, valid from joined() to left().
class CacheDirectory {
 public:
  // The prefix of a prompt that one instance has, in blocks from the first one on.
  struct Hit {
    int device = 0;  // blocks in its prefix cache
    int host = 0;    // … there or in its host tier
    int all = 0;     // … there or on its disk
  };
  // Adds an instance and returns its number. It gets at most these many entries, and never more than kMost, whatever it
  // reports.
  int joined(int capacity_blocks, int tier_blocks = 0);
  void left(int instance);  // removes the instance from all its blocks
  // Applies a report: first its removed blocks, then its stored ones.
  void heard(int instance, const CacheReport& report);
  // Returns a hit for each instance number. It is valid until the next call.
  std::span<const Hit> find(std::span<const uint64_t> hashes);
  size_t blocks(int instance) const { return instances_[size_t(instance)].blocks; }

 private:
  static constexpr size_t kMost = size_t{1} << 22;
  struct Instance {
    size_t capacity = 0, blocks = 0;
    bool there = false;
  };
  struct Holder {  // of a block
    int instance;
    uint32_t tiers;  // a bit for each Tier that has it
  };
  using Holders = std::vector<Holder>;

  void stored(int instance, uint64_t hash, uint32_t tier);
  bool removed(int instance, Holders& holders, uint32_t tiers);

  std::vector<Instance> instances_;
  std::unordered_map<uint64_t, Holders> blocks_;  // by hash; no list is empty
  std::vector<Hit> found_;                        // of the last prompt
};

}  // namespace xpyd::disagg
