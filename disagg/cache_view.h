// What the conductor knows of the prefix caches of instances in other processes, from what they report. It may be late,
// which costs time: a prompt goes where its prefix is no more, and is computed there.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <unordered_set>
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

// Of one instance.
class CacheView {
 public:
  // An instance has no more blocks than that; nor more than kMost, whatever it says.
  void set_capacity(int blocks) { capacity_ = std::min(size_t(blocks), kMost); }
  void heard(const CacheReport& report) {
    for (uint64_t hash : report.removed) known_.erase(hash);
    for (uint64_t hash : report.stored)
      if (known_.size() < capacity_) known_.insert(hash);
  }
  int promise(PromptHashes& prompt, int block_tokens) const {  // tokens
    if (known_.empty()) return 0;
    const auto hashes = prompt.of(block_tokens);
    const auto unknown = std::ranges::find_if(hashes, [this](uint64_t hash) { return !known_.contains(hash); });
    return int(unknown - hashes.begin()) * block_tokens;
  }
  size_t blocks() const { return known_.size(); }

 private:
  static constexpr size_t kMost = size_t{1} << 22;
  size_t capacity_ = 0;
  std::unordered_set<uint64_t> known_;
};

}  // namespace xpyd::disagg
