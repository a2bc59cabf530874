#include "batch/recent_texts.h"

#include <algorithm>
#include <bit>

#include "batch/ngram.h"

namespace xpyd::batch {

RecentTexts::RecentTexts(int min, int max, size_t ngrams)
    : min_(min),
      max_(max),
      width_(size_t(max - min + 1)),
      slots_(std::max(size_t{2}, ngrams / width_)),
      keys_(slots_.size() * width_),
      table_(std::bit_ceil(2 * keys_.size())) {}

size_t RecentTexts::bytes() const {
  return slots_.capacity() * sizeof(Slot) + keys_.capacity() * sizeof(uint64_t) + table_.capacity() * sizeof(uint32_t);
}

size_t RecentTexts::find(uint64_t key) const {
  const size_t mask = table_.size() - 1;
  size_t at = size_t(key >> 7) & mask;
  while (table_[at] != 0 && keys_[table_[at] - 1] != key) at = (at + 1) & mask;
  return at;
}

void RecentTexts::add(size_t slot, size_t i, uint64_t key) {
  uint32_t& there = table_[find(key)];
  keys_[slot * width_ + i] = key;
  // Its sequence may have paused, and others have told the same since.
  if (there == 0 || age((there - 1) / width_) >= age(slot)) there = uint32_t(slot * width_ + i + 1);
}

// Nobody looks for what began in this slot any more.
void RecentTexts::clear(size_t slot) {
  const size_t mask = table_.size() - 1;
  for (size_t i = slot * width_; i < (slot + 1) * width_; ++i) {
    if (keys_[i] == 0) continue;
    size_t hole = find(keys_[i]);
    keys_[i] = 0;
    if (table_[hole] != i + 1) continue;
    table_[hole] = 0;
    // Who has been put behind the hole, because it was not one, moves up.
    for (size_t at = (hole + 1) & mask; table_[at] != 0; at = (at + 1) & mask) {
      const size_t home = size_t(keys_[table_[at] - 1] >> 7) & mask;
      if (((at - home) & mask) < ((at - hole) & mask)) continue;
      table_[hole] = table_[at], table_[at] = 0;
      hole = at;
    }
  }
  slots_[slot] = {};
}

void RecentTexts::tell(std::span<const int32_t> tokens, uint64_t salt, Place& place) {
  for (; place.told < tokens.size(); ++place.told) {
    const uint64_t now = ++told_;
    const size_t slot = now % slots_.size();
    clear(slot);
    slots_[slot].token = tokens[place.told];
    if (place.told > 0 && now - place.last < slots_.size()) {
      const size_t before = place.last % slots_.size();
      slots_[before].next = uint32_t(now - place.last);
      each_ngram(tokens.first(place.told), min_, max_, salt,
                 [&](int n, uint64_t key) { add(before, size_t(n - min_), key); });
    }
    place.last = now;
  }
}

void RecentTexts::propose(std::span<const int32_t> tokens, uint64_t salt, int most, std::vector<int32_t>& out) const {
  uint32_t found = 0;
  each_ngram(tokens, min_, max_, salt, [&](int, uint64_t key) {
    if (const uint32_t there = table_[find(key)]; there != 0) found = there;
  });
  if (found == 0) return;
  size_t slot = (found - 1) / width_;
  while (most-- > 0 && slots_[slot].next != 0) {
    slot = (slot + slots_[slot].next) % slots_.size();
    out.push_back(slots_[slot].token);
  }
}

}  // namespace xpyd::batch
