#include <algorithm>

#include "base/status.h"
#include "base/utf8.h"
#include "model/text/tokenizer_impl.h"

namespace xpyd::model {
namespace {

uint64_t pair_of(int32_t left, int32_t right) { return uint64_t(left) << 32 | uint32_t(right); }

bool later(const Bpe::Candidate& a, const Bpe::Candidate& b) { return a.order > b.order; }

}  // namespace

void Bpe::add_merge(int32_t left, int32_t right, uint32_t rank, int32_t merged) {
  merges_[pair_of(left, right)] = {rank, merged};
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::symbols_of(std::string_view word, std::vector<Symbol>& symbols) const {
  symbols.clear();
  auto add = [&](int32_t id) {
    int32_t n = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, n - 1, n + 1});
  };
  while (!word.empty()) {
    const std::string_view c = word.substr(0, byte_level ? 1 : size_t(next_code_point(word).bytes));
    word.remove_prefix(c.size());
    const auto known = byte_level ? ids.end() : ids.find(c);
    if (known != ids.end())
      add(known->second);
    else
      for (char byte : c) add(byte_ids[static_cast<uint8_t>(byte)]);
  }
  if (!symbols.empty()) symbols.back().next = -1;
}

void Bpe::merge_all(bool allow_special, Workspace& space) const {
  std::vector<Symbol>& symbols = space.symbols;
  std::vector<Candidate>& heap = space.heap;
  heap.clear();
  auto candidate = [&](int32_t left) {
    if (left < 0 || symbols[left].next < 0) return false;
    const Merge* merge = find(symbols[left].id, symbols[symbols[left].next].id);
    if (merge == nullptr || (!allow_special && special[merge->merged])) return false;
    heap.push_back({uint64_t{merge->rank} << 32 | uint32_t(left), merge->merged});
    return true;
  };
  for (int32_t i = 0; i < static_cast<int32_t>(symbols.size()); ++i) candidate(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = symbols[top.left()];
    if (left.id < 0 || left.next < 0) continue;
    // The entry is stale unless the pair that is here now makes the same token.
    Symbol& right = symbols[left.next];
    const Merge* merge = find(left.id, right.id);
    if (merge == nullptr || merge->merged != top.merged) continue;
    left.id = top.merged;
    right.id = -1;
    left.next = right.next;
    if (right.next >= 0) symbols[right.next].prev = top.left();
    for (int32_t begin : {left.prev, top.left()})
      if (candidate(begin)) std::push_heap(heap.begin(), heap.end(), later);
  }
}

void Bpe::encode(std::string_view word, bool allow_special, Workspace& space, std::vector<int32_t>& out) const {
  constexpr size_t kLongest = size_t{1} << 30;  // so that indices fit
  while (word.size() > kLongest) {
    size_t cut = kLongest;
    while ((static_cast<uint8_t>(word[cut]) & 0xc0) == 0x80) --cut;
    encode(word.substr(0, cut), allow_special, space, out);
    word.remove_prefix(cut);
  }
  if (ignore_merges) {
    auto whole = ids.find(word);
    if (whole != ids.end() && (allow_special || !special[whole->second])) {
      out.push_back(whole->second);
      return;
    }
  }
  symbols_of(word, space.symbols);
  merge_all(true, space);
  if (!allow_special) {
    auto made = [&](const Symbol& s) { return s.id >= 0 && special[s.id]; };
    if (std::any_of(space.symbols.begin(), space.symbols.end(), made)) {
      symbols_of(word, space.symbols);
      merge_all(false, space);
    }
  }
  for (const Symbol& symbol : space.symbols)
    if (symbol.id >= 0) out.push_back(symbol.id);
}

}  // namespace xpyd::model
