// Where in the recent text of all sequences of an engine some tokens have stood, and what followed: what a sequence's
// own text does not tell, another's may (suffix decoding, arXiv 2411.04975, which counts continuations in a tree of
// depth 24; here the last one is taken, behind the longest n-gram). Thread safety: none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace xpyd::batch {

// The last tokens() tokens of all, in the order in which they were told; who comes drives out the oldest. A token costs
// max - min + 1 entries, a look-up as many, and the memory is taken once: nothing grows.
class RecentTexts {
 public:
  static constexpr size_t kNgrams = 1 << 18;  // at most 6 MiB; of 2 to 4 tokens 87,381 tokens

  RecentTexts(int min, int max, size_t ngrams = kNgrams);
  // Of one sequence: how many of its tokens have been told, and when the last of them was.
  struct Place {
    size_t told = 0;
    uint64_t last = 0;
  };
  // A sequence that only grows has these tokens.
  void tell(std::span<const int32_t> tokens, uint64_t salt, Place& place);
  // At most `most` tokens that followed the longest of the last n-grams where it was told last, under this salt.
  void propose(std::span<const int32_t> tokens, uint64_t salt, int most, std::vector<int32_t>& out) const;

  size_t tokens() const { return slots_.size(); }
  size_t bytes() const;

 private:
  // The token that was told as the n-th is in slot n % tokens(). Whose slot is here, those after it are, too.
  struct Slot {
    int32_t token = 0;
    uint32_t next = 0;  // so many slots on is the sequence's next token; 0: there is none
  };
  size_t find(uint64_t key) const;  // in table_: its place, or a free one
  void add(size_t slot, size_t i, uint64_t key);
  void clear(size_t slot);
  size_t age(size_t slot) const { return (told_ - slot) % slots_.size(); }

  int min_, max_;
  size_t width_;       // n-grams that end in a token
  uint64_t told_ = 0;  // of all
  std::vector<Slot> slots_;
  std::vector<uint64_t> keys_;   // [slot][width]: of the n-grams that end there and were followed; 0: none
  std::vector<uint32_t> table_;  // open addressing, at most half full: 1 + the place in keys_ that was told last
};

}  // namespace xpyd::batch
