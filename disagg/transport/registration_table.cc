#include "disagg/transport/registration_table.h"

#include <algorithm>

#include "disagg/net/hello.h"

namespace xpyd::disagg {

std::vector<AddressRange> joined(std::vector<AddressRange> ranges, uint64_t gap) {
  std::erase_if(ranges, [](const AddressRange& range) { return range.bytes == 0; });
  if (!std::ranges::is_sorted(ranges, {}, &AddressRange::begin)) std::ranges::sort(ranges, {}, &AddressRange::begin);
  size_t n = 0;
  for (const AddressRange& range : ranges) {
    AddressRange* last = n > 0 ? &ranges[n - 1] : nullptr;
    if (last && range.begin <= last->begin + last->bytes + gap)
      last->bytes = std::max(last->bytes, range.begin + range.bytes - last->begin);
    else
      ranges[n++] = range;
  }
  ranges.resize(n);
  return ranges;
}

const AddressRange* find_range(std::span<const AddressRange> ranges, uint64_t begin, uint64_t bytes) {
  const auto after = std::ranges::upper_bound(ranges, begin, {}, &AddressRange::begin);
  if (after == ranges.begin()) return nullptr;
  const AddressRange& range = *std::prev(after);
  const uint64_t at = begin - range.begin;
  return at < range.bytes && bytes <= range.bytes - at ? &range : nullptr;
}

RangeSet::RangeSet(std::span<const MemoryRange> ranges) {
  for (const MemoryRange& range : ranges) ranges_.push_back({reinterpret_cast<uint64_t>(range.data()), range.size()});
  ranges_ = joined(std::move(ranges_));
}

RegistrationTable::RegistrationTable(std::span<const MemoryRange> regions, bool secrets)
    : regions_(regions), secrets_(secrets) {}

void RegistrationTable::connect(PeerId peer) {
  std::lock_guard lock(mutex_);
  peers_.insert(peer);
}

void RegistrationTable::disconnect(PeerId peer) {
  std::lock_guard lock(mutex_);
  peers_.erase(peer);
}

bool RegistrationTable::connected(PeerId peer) const {
  std::lock_guard lock(mutex_);
  return peers_.count(peer) > 0;
}

Result<RemoteKey> RegistrationTable::open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
  for (const MemoryRange& range : ranges) {
    if (!regions_.contains(range.data(), range.size()))
      return invalid("registration for instance " + std::to_string(peer) +
                     ": a range is outside this instance's KV memory");
  }
  RangeSet set(ranges);
  const uint64_t secret = secrets_ ? random_secret() : 0;
  std::lock_guard lock(mutex_);
  if (free_.empty()) {
    free_.push_back(uint32_t(slots_.size()));
    slots_.emplace_back();
  }
  const uint32_t index = free_.front();
  free_.pop_front();
  const uint32_t generation = slots_[index].generation + 1;
  slots_[index] = {peer, op, generation, secret, true, 0, 0, std::move(set)};
  return RemoteKey{index, generation, secret};
}

const RegistrationTable::Slot* RegistrationTable::find(const RemoteKey& registration) const {
  if (registration.generation == 0 || registration.index >= slots_.size()) return nullptr;
  const Slot& slot = slots_[registration.index];
  const bool here = slot.generation == registration.generation && slot.secret == registration.secret &&
                    (slot.open || slot.inside > 0);
  return here ? &slot : nullptr;
}

bool RegistrationTable::close(const RemoteKey& registration) {
  std::lock_guard lock(mutex_);
  if (!find(registration)) return true;
  Slot& slot = slots_[registration.index];
  const bool was_open = std::exchange(slot.open, false);
  if (was_open) free_if_left(registration.index);
  return slot.inside == 0;
}

void RegistrationTable::free_if_left(uint32_t index) {
  Slot& slot = slots_[index];
  if (slot.open || slot.inside > 0) return;
  slot.ranges = RangeSet();
  if (slot.generation != UINT32_MAX) free_.push_back(index);
}

int RegistrationTable::arrived(const RemoteKey& registration) const {
  std::lock_guard lock(mutex_);
  const Slot* slot = find(registration);
  return slot ? slot->arrived : 0;
}

void RegistrationTable::shut() {
  std::lock_guard lock(mutex_);
  shut_ = true;
}

RegistrationTable::Slot* RegistrationTable::admit(const RemoteKey& registration, PeerId peer, KvOp op) {
  const Slot* slot = find(registration);
  const bool may = slot && slot->open && slot->peer == peer && slot->op == op && peers_.count(peer) > 0 && !shut_;
  return may ? &slots_[registration.index] : nullptr;
}

bool RegistrationTable::enter(const RemoteKey& registration, PeerId peer, KvOp op, std::span<const Copy> copies) {
  std::lock_guard lock(mutex_);
  Slot* slot = admit(registration, peer, op);
  if (!slot) return false;
  for (const Copy& copy : copies)
    if (!slot->ranges.contains(op == KvOp::write ? copy.destination : copy.source, copy.bytes)) return false;
  ++slot->inside;
  return true;
}

bool RegistrationTable::enter(const RemoteKey& registration, PeerId peer, KvOp op, const std::byte* begin,
                              size_t bytes) {
  const Copy copy{begin, const_cast<std::byte*>(begin), bytes};
  return enter(registration, peer, op, {&copy, 1});
}

bool RegistrationTable::leave(const RemoteKey& registration, bool whole) {
  std::lock_guard lock(mutex_);
  XPYD_CHECK(registration.index < slots_.size());
  Slot& slot = slots_[registration.index];
  XPYD_CHECK(slot.generation == registration.generation && slot.inside > 0);
  --slot.inside;
  if (!slot.open) {
    free_if_left(registration.index);
    return false;
  }
  slot.arrived += whole;
  return true;
}

}  // namespace xpyd::disagg
