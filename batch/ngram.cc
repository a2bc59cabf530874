#include "batch/ngram.h"

#include <algorithm>
#include <utility>

#include "batch/recent_texts.h"

namespace xpyd::batch {

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
  for (; indexed_ + 1 < tokens.size(); ++indexed_) {  // those at the very end are what is looked for
    if (2 * (used_ + size_t(max_)) > entries_.size()) grow();
    each_ngram(tokens.first(indexed_ + 1), min_, max_, 0, [&](int, uint64_t key) {
      Entry& e = entry(key);
      used_ += e.behind == 0;
      e = {key, int32_t(indexed_ + 1)};
    });
  }
  size_t from = 0;
  each_ngram(tokens, min_, max_, 0, [&](int n, uint64_t key) {
    const size_t behind = size_t(entry(key).behind), length = size_t(n);
    // Two n-grams may have one key.
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
  RecentTexts::Place place;
};

// A sequence's own text is asked first, then that of all.
class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const SpeculationOptions& options) : options_(options) {
    if (options.ngram_scope == NgramScope::prompts)
      recent_ = std::make_unique<RecentTexts>(options.ngram_min, options.ngram_max);
  }
  void draft(std::span<DraftWish> wishes) override {
    for (DraftWish& wish : wishes) {
      NgramMemory& memory = memory_of(wish);
      memory.index.propose(wish.tokens, wish.most, wish.drafts);
      if (!recent_) continue;
      if (wish.drafts.empty()) recent_->propose(wish.tokens, wish.salt, wish.most, wish.drafts);
      recent_->tell(wish.tokens, wish.salt, memory.place);
    }
  }
  void ended(DraftWish last) override {
    if (recent_) recent_->tell(last.tokens, last.salt, memory_of(last).place);
  }

 private:
  NgramMemory& memory_of(DraftWish& wish) const {
    if (!wish.memory) wish.memory = std::make_unique<NgramMemory>(options_);
    return static_cast<NgramMemory&>(*wish.memory);
  }

  SpeculationOptions options_;
  std::unique_ptr<RecentTexts> recent_;  // null: nobody sees another's text
};

}  // namespace

std::unique_ptr<Drafter> make_ngram_drafter(const SpeculationOptions& options) {
  return std::make_unique<NgramDrafter>(options);
}

}  // namespace xpyd::batch
