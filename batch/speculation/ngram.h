// Where in a sequence its last tokens have stood before. Thread safety: none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "batch/drafter.h"

namespace xpyd::batch {

// Of a sequence that only grows. Every n-gram of min to max tokens has the place behind its last occurrence, so that a
// token costs max - min + 1 entries, and a look-up as many.
class NgramIndex {
 public:
  NgramIndex(int min, int max) : min_(min), max_(max) {}
  // At most `most` tokens that followed where the longest of the last n-grams stood last; none where it never did. What
  // follows beyond the end of the sequence is what is proposed: a period goes on.
  void propose(std::span<const int32_t> tokens, int most, std::vector<int32_t>& out);

 private:
  struct Entry {
    uint64_t key = 0;
    int32_t behind = 0;  // 0: free
  };
  Entry& entry(uint64_t key);
  template <class F>
  void keys(std::span<const int32_t> tokens, F&& f) const;
  void grow();

  int min_, max_;
  size_t indexed_ = 0;  // n-grams that end in these tokens are there
  size_t used_ = 0;
  std::vector<Entry> entries_ = std::vector<Entry>(64);  // open addressing, a power of two, at most half full
};

std::unique_ptr<Drafter> make_ngram_drafter(const SpeculationOptions& options);

}  // namespace xpyd::batch
