#include "allocator/slot_contents.h"

#include <algorithm>
#include <climits>
#include <cstring>

namespace xpyd::allocator {
namespace {

// Leading elements that are equal. memcmp reads 32 bytes at a time, a loop that may stop anywhere four.
size_t common(const int32_t* a, const int32_t* b, size_t n) {
  constexpr size_t kStep = 256;
  size_t i = 0;
  while (i + kStep <= n && std::memcmp(a + i, b + i, kStep * sizeof *a) == 0) i += kStep;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

}  // namespace

void SlotContents::begin(int slot, std::span<const int32_t> tokens, uint64_t salt) {
  std::lock_guard lock(mutex_);
  Slot& s = slots_[size_t(slot)];
  s.tokens.assign(tokens.begin(), tokens.end());
  s.salt = salt;
  s.ended = false;
}

void SlotContents::begin_like(int slot, int other) {
  std::lock_guard lock(mutex_);
  slots_[size_t(slot)].tokens = slots_[size_t(other)].tokens;
  slots_[size_t(slot)].salt = slots_[size_t(other)].salt;
  slots_[size_t(slot)].ended = false;
}

void SlotContents::add(int slot, std::span<const int32_t> tokens) {
  std::lock_guard lock(mutex_);
  std::vector<int32_t>& held = slots_[size_t(slot)].tokens;
  held.insert(held.end(), tokens.begin(), tokens.end());
}

void SlotContents::end(int slot) {
  std::lock_guard lock(mutex_);
  slots_[size_t(slot)].ended = true;
}

void SlotContents::truncate(int slot, int tokens) {
  std::lock_guard lock(mutex_);
  std::vector<int32_t>& held = slots_[size_t(slot)].tokens;
  held.resize(std::min(held.size(), size_t(tokens)));
}

void SlotContents::clear_idle() {
  std::lock_guard lock(mutex_);
  for (Slot& s : slots_)
    if (s.ended) s.tokens.clear();
}

int SlotContents::size(int slot) const {
  std::lock_guard lock(mutex_);
  return int(slots_[size_t(slot)].tokens.size());
}

bool SlotContents::takeable(int slot) const {
  std::lock_guard lock(mutex_);
  return slots_[size_t(slot)].ended && !slots_[size_t(slot)].tokens.empty();
}

SlotContents::Match SlotContents::find(std::span<const int32_t> tokens, uint64_t salt, bool take) const {
  if (tokens.empty()) return {};
  tokens = tokens.first(tokens.size() - 1);
  Match best;
  size_t found = kLeast, least_loss = 0;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    const size_t n = std::min(s.tokens.size(), tokens.size());
    if (n < found || s.salt != salt || s.tokens[found - 1] != tokens[found - 1]) continue;
    if (take && !s.ended) continue;
    const size_t same = common(s.tokens.data(), tokens.data(), n);
    if (same < found || (take && 2 * same < s.tokens.size())) continue;
    const size_t loss = s.ended ? s.tokens.size() - same : size_t(INT_MAX);
    if (best.slot >= 0 && same == found && loss >= least_loss) continue;
    best = {int(i), int(same)};
    found = same;
    least_loss = loss;
  }
  return best;
}

}  // namespace xpyd::allocator
