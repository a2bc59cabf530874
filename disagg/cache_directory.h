// Which instances hold which blocks in their prefix caches, as they report it. It may be late, which costs time: a
// prompt goes where its prefix is no more, and is computed there. One walk over a prompt's blocks finds what every
// instance has of it, whatever their number.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "allocator/prefix_index.h"
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

// Instances by small numbers: each has one from joined() to left().
class CacheDirectory {
 public:
  // It has no more blocks than that; nor more than kMost, whatever it says.
  int joined(int capacity_blocks);
  void left(int instance);
  void heard(int instance, const CacheReport& report);
  // [instance]: blocks that it has of these, from the first one on.
  std::span<const int> find(std::span<const uint64_t> hashes);
  size_t blocks(int instance) const { return instances_[size_t(instance)].blocks; }

 private:
  static constexpr size_t kMost = size_t{1} << 22;
  struct Held {
    size_t capacity = 0, blocks = 0;
    bool there = false;
  };
  void forget(std::unordered_map<uint64_t, std::vector<uint16_t>>::iterator block, int instance);

  std::vector<Held> instances_;
  std::unordered_map<uint64_t, std::vector<uint16_t>> holders_;
  std::vector<int> found_;
};

}  // namespace xpyd::disagg
