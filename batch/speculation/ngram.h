// Prompt lookup: finds earlier occurrences of a sequence's last tokens. Thread safety: none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "batch/drafter.h"

namespace xpyd::batch {

// An index over one sequence that only grows. It maps every n-gram of min to max tokens to the position after its last
// occurrence. A token costs max - min + 1 entries, and a look-up reads as many.
class NgramIndex {
 public:
  NgramIndex(int min, int max) : min_(min), max_(max) {}
  // Appends up to `most` tokens that followed the last occurrence of the longest matching n-gram; none if nothing
  // matches. Past the end of the sequence it continues with its own proposal, so a period repeats.
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
  size_t indexed_ = 0;  // n-grams that end in these tokens are indexed
  size_t used_ = 0;
  std::vector<Entry> entries_ = std::vector<Entry>(64);  // open addressing; a power of two, at most half full
};

std::unique_ptr<Drafter> make_ngram_drafter(const SpeculationOptions& options);

}  // namespace xpyd::batch
