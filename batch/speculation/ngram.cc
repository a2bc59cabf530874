#include "batch/speculation/ngram.h"

#include <algorithm>
#include <utility>

namespace xpyd::batch {

// Calls f(n, key) for the n-grams at the end of `tokens`, shortest first.
template <class F>
void NgramIndex::keys(std::span<const int32_t> tokens, F&& f) const {
  uint64_t key = 0;
  for (int n = 1; n <= max_ && size_t(n) <= tokens.size(); ++n) {
    key = (key ^ uint32_t(tokens[tokens.size() - size_t(n)])) * 0x9e3779b97f4a7c15u;
    key ^= key >> 29;
    if (n >= min_) f(n, key + uint64_t(n));
  }
}

NgramIndex::Entry& NgramIndex::entry(uint64_t key) {
  const size_t mask = entries_.size() - 1;
  size_t at = size_t(key >> 7) & mask;
  while (entries_[at].behind != 0 && entries_[at].key != key) at = (at + 1) & mask;
  return entries_[at];
}

void NgramIndex::grow() {
  std::vector<Entry> old(entries_.size() * 2);
  std::swap(old, entries_);
  for (const Entry& e : old)
    if (e.behind != 0) entry(e.key) = e;
}

void NgramIndex::propose(std::span<const int32_t> tokens, int most, std::vector<int32_t>& out) {
  for (; indexed_ + 1 < tokens.size(); ++indexed_) {  // the last n-grams are what is searched for
    if (2 * (used_ + size_t(max_)) > entries_.size()) grow();
    keys(tokens.first(indexed_ + 1), [&](int, uint64_t key) {
      Entry& e = entry(key);
      used_ += e.behind == 0;
      e = {key, int32_t(indexed_ + 1)};
    });
  }
  size_t from = 0;
  keys(tokens, [&](int n, uint64_t key) {
    const size_t behind = size_t(entry(key).behind), length = size_t(n);
    // Two n-grams may share a key, so the tokens are compared.
    if (behind >= length && std::ranges::equal(tokens.subspan(behind - length, length), tokens.last(length)))
      from = behind;
  });
  if (from == 0) return;
  for (size_t i = from; i < from + size_t(most); ++i)
    out.push_back(i < tokens.size() ? tokens[i] : out[out.size() - (tokens.size() - from)]);
}

namespace {

struct NgramMemory final : DraftMemory {
  explicit NgramMemory(const SpeculationOptions& o) : index(o.ngram_min, o.ngram_max) {}
  NgramIndex index;
};

class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const SpeculationOptions& options) : options_(options) {}
  void draft(std::span<DraftWish> wishes) override {
    for (DraftWish& wish : wishes) {
      if (!wish.memory) wish.memory = std::make_unique<NgramMemory>(options_);
      static_cast<NgramMemory&>(*wish.memory).index.propose(wish.tokens, wish.most, wish.drafts);
    }
  }

 private:
  SpeculationOptions options_;
};

}  // namespace

std::unique_ptr<Drafter> make_ngram_drafter(const SpeculationOptions& options) {
  return std::make_unique<NgramDrafter>(options);
}

}  // namespace xpyd::batch
