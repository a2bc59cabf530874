#include "disagg/pool/directory.h"

#include <bit>
#include <utility>

#include "base/status.h"

namespace xpyd::disagg {

CacheDirectory::CacheDirectory() { grow(); }

int CacheDirectory::joined(int capacity_blocks, int tier_blocks) {
  auto free = std::ranges::find(instances_, false, &Held::there);
  if (free == instances_.end()) free = instances_.insert(free, Held{});
  *free = {.capacity = std::min(size_t(capacity_blocks) + size_t(tier_blocks), kMost), .there = true};
  const auto number = int(free - instances_.begin());
  XPYD_CHECK(number <= UINT16_MAX);
  return number;
}

// An entry that erase() moves into this place is examined next. An entry that it moves to the table's end was examined
// at the beginning.
void CacheDirectory::left(int instance) {
  for (size_t place = 0; place < slots_.size();) {
    const uint64_t key = slots_[place].key();
    if (key != 0) removed(instance, place, ~uint32_t{0});
    if (slots_[place].key() == key) ++place;
  }
  instances_[size_t(instance)].there = false;
}

size_t CacheDirectory::bytes() const {
  size_t bytes = memory_.size();
  for (const auto& holders : many_) bytes += sizeof holders + holders.capacity() * sizeof holders[0];
  return bytes;
}

// Returns the key's place, or the place where it would be inserted.
size_t CacheDirectory::find_place(uint64_t key) const {
  const size_t mask = slots_.size() - 1;
  for (size_t place = place_of(key);; place = (place + 1) & mask)
    if (const uint64_t there = slots_[place].key(); there == key || there == 0) return place;
}

std::span<uint32_t> CacheDirectory::holders_at(size_t place) {
  uint32_t& one = slots_[place].holders;
  return one & kMany ? std::span(many_[one & ~kMany]) : std::span(&one, 1);
}

void CacheDirectory::grow() {
  constexpr size_t kFirst = 1024;
  const Buffer before = std::exchange(memory_, Buffer(sizeof(Slot) * std::max(kFirst, 2 * slots_.size())));
  const std::span<const Slot> slots = std::exchange(slots_, {memory_.as<Slot>(), memory_.size() / sizeof(Slot)});
  shift_ = std::countl_zero(slots_.size()) + 1;
  for (const Slot& slot : slots)
    if (const uint64_t key = slot.key(); key != 0) slots_[find_place(key)] = slot;
}

void CacheDirectory::heard(int instance, const CacheReport& report) {
  const uint32_t tier = 1u << int(report.tier);
  for (uint64_t hash : report.removed)
    if (const size_t place = find_place(key_of(hash)); slots_[place].key() != 0) removed(instance, place, tier);
  for (uint64_t hash : report.stored) stored(instance, key_of(hash), tier);
}

void CacheDirectory::stored(int instance, uint64_t key, uint32_t tier) {
  size_t place = find_place(key);
  Held& held = instances_[size_t(instance)];
  if (slots_[place].key() != 0)
    for (uint32_t& one : holders_at(place))
      if (instance_of(one) == instance) return void(one |= tier << 16);
  if (held.blocks >= held.capacity) return;
  ++held.blocks;
  if (slots_[place].key() == 0) {
    if (4 * ++used_ > 3 * slots_.size()) grow(), place = find_place(key);
    return slots_[place].set(key, holder(instance, tier));
  }
  uint32_t& holders = slots_[place].holders;
  if (!(holders & kMany)) {
    if (unused_.empty()) unused_.push_back(uint32_t(many_.size())), many_.emplace_back();
    const uint32_t index = unused_.back();
    unused_.pop_back();
    many_[index] = {std::exchange(holders, kMany | index)};
  }
  many_[holders & ~kMany].push_back(holder(instance, tier));
}

// The instance no longer has the block in these tiers (bits of Tier).
void CacheDirectory::removed(int instance, size_t place, uint32_t tiers) {
  const std::span<uint32_t> all = holders_at(place);
  const auto one = std::ranges::find(all, instance, instance_of);
  if (one == all.end()) return;
  *one = holder(instance, tiers_of(*one) & ~tiers);
  if (tiers_of(*one) != 0) return;
  --instances_[size_t(instance)].blocks;
  if (all.size() == 1) return erase(place);
  const uint32_t index = slots_[place].holders & ~kMany;
  std::vector<uint32_t>& many = many_[index];
  many.erase(many.begin() + (one - all.begin()));
  if (many.size() > 1) return;
  slots_[place].holders = many[0];
  many = {};
  unused_.push_back(index);
}

// Moves later entries up if a probe would stop at the gap before it finds them.
void CacheDirectory::erase(size_t place) {
  const size_t mask = slots_.size() - 1;
  for (size_t next = (place + 1) & mask; slots_[next].key() != 0; next = (next + 1) & mask) {
    const size_t home = place_of(slots_[next].key());
    if (((next - home) & mask) < ((next - place) & mask)) continue;
    slots_[place] = slots_[next];
    place = next;
  }
  slots_[place] = {};
  --used_;
}

std::span<const CacheDirectory::Hit> CacheDirectory::find(std::span<const uint64_t> hashes) {
  // The table does not fit the processor's caches. While one block is examined, the entries of later blocks are
  // prefetched, then the lists of blocks with several holders, then the contents of these lists.
  constexpr size_t kPlace = 32, kList = 12, kNames = 6;  // in blocks ahead
  constexpr uint32_t kDevice = 1, kHost = 2;
  for (const int instance : first_) found_[size_t(instance)] = {};
  first_.clear();
  found_.resize(instances_.size());
  size_t places[kPlace];
  const auto list = [&](size_t i) {
    const uint32_t holders = slots_[places[i % kPlace]].holders;
    return holders & kMany ? &many_[holders & ~kMany] : nullptr;
  };
  for (size_t step = 0; step < hashes.size() + kPlace; ++step) {
    if (step < hashes.size()) __builtin_prefetch(&slots_[place_of(key_of(hashes[step]))]);
    if (const size_t i = step - (kPlace - kList); i < hashes.size()) {
      places[i % kPlace] = find_place(key_of(hashes[i]));
      if (const auto* holders = list(i)) __builtin_prefetch(holders);
    }
    if (const size_t i = step - (kPlace - kNames); i < hashes.size())
      if (const auto* holders = list(i)) __builtin_prefetch(holders->data());
    if (step < kPlace) continue;
    const size_t place = places[step % kPlace];
    if (slots_[place].key() == 0) break;
    bool any = false;
    const auto n = int(step - kPlace);
    if (n == 0)
      for (const uint32_t one : holders_at(place)) first_.push_back(instance_of(one));
    for (const uint32_t one : holders_at(place)) {
      Hit& hit = found_[size_t(instance_of(one))];
      if (hit.all != n) continue;
      any = true;
      hit.all = n + 1;
      if (hit.host == n && tiers_of(one) & (kDevice | kHost)) hit.host = n + 1;
      if (hit.device == n && tiers_of(one) & kDevice) hit.device = n + 1;
    }
    if (!any) break;
  }
  return found_;
}

}  // namespace xpyd::disagg
