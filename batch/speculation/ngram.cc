#include "batch/speculation/ngram.h"

#include <algorithm>

namespace xpyd::batch {
namespace {

// Calls f(n, key) for the n-grams at the end of `tokens`, shortest first.
template <class F>
void each_ngram(std::span<const int32_t> tokens, F&& f) {
  uint64_t key = 0;
  for (int n = 1; n <= NgramIndex::kMax && size_t(n) <= tokens.size(); ++n) {
    key = (key ^ uint32_t(tokens[tokens.size() - size_t(n)])) * 0x9e3779b97f4a7c15u;
    key ^= key >> 29;
    if (n >= NgramIndex::kMin) f(n, key + uint64_t(n));
  }
}

struct NgramMemory final : DraftMemory {
  NgramIndex index;
};

class NgramDrafter final : public Drafter {
 public:
  void draft(std::span<DraftWish> wishes) override {
    for (DraftWish& wish : wishes) {
      if (!wish.memory) wish.memory = std::make_unique<NgramMemory>();
      static_cast<NgramMemory&>(*wish.memory).index.propose(wish.tokens, wish.most, wish.drafts);
    }
  }
};

}  // namespace

void NgramIndex::propose(std::span<const int32_t> tokens, int most, std::vector<int32_t>& out) {
  for (; indexed_ + 1 < tokens.size(); ++indexed_)  // the last n-grams are what is searched for
    each_ngram(tokens.first(indexed_ + 1), [&](int, uint64_t key) { behind_[key] = int32_t(indexed_ + 1); });
  size_t from = 0;
  each_ngram(tokens, [&](int n, uint64_t key) {
    const auto found = behind_.find(key);
    const size_t behind = found == behind_.end() ? 0 : size_t(found->second), length = size_t(n);
    // Two n-grams may share a key, so the tokens are compared.
    if (behind >= length && std::ranges::equal(tokens.subspan(behind - length, length), tokens.last(length)))
      from = behind;
  });
  if (from == 0) return;
  for (size_t i = from; i < from + size_t(most); ++i)
    out.push_back(i < tokens.size() ? tokens[i] : out[out.size() - (tokens.size() - from)]);
}

std::unique_ptr<Drafter> make_ngram_drafter() { return std::make_unique<NgramDrafter>(); }

}  // namespace xpyd::batch
