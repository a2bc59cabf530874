// Prompt lookup: finds earlier occurrences of a sequence's last tokens. Thread safety: none.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "batch/drafter.h"

namespace xpyd::batch {

// An index over one sequence that only grows. It maps every n-gram of kMin to kMax tokens to the position after its
// last occurrence.
class NgramIndex {
 public:
  static constexpr int kMin = 2, kMax = 4;
  // Appends up to `most` tokens that followed the last occurrence of the longest matching n-gram; none if nothing
  // matches. Past the end of the sequence it continues with its own proposal, so a period repeats.
  void propose(std::span<const int32_t> tokens, int most, std::vector<int32_t>& out);

 private:
  size_t indexed_ = 0;  // n-grams that end in these tokens are indexed
  std::unordered_map<uint64_t, int32_t> behind_;
};

std::unique_ptr<Drafter> make_ngram_drafter();

}  // namespace xpyd::batch
