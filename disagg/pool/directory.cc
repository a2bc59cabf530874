#include "disagg/pool/directory.h"

#include <algorithm>

namespace xpyd::disagg {

int CacheDirectory::joined(int capacity_blocks, int tier_blocks) {
  auto free = std::ranges::find(instances_, false, &Instance::there);
  if (free == instances_.end()) free = instances_.insert(free, Instance{});
  *free = {.capacity = std::min(size_t(capacity_blocks) + size_t(tier_blocks), kMost), .there = true};
  return int(free - instances_.begin());
}

void CacheDirectory::left(int instance) {
  for (auto at = blocks_.begin(); at != blocks_.end();)
    at = removed(instance, at->second, ~uint32_t{0}) ? blocks_.erase(at) : std::next(at);
  instances_[size_t(instance)].there = false;
}

void CacheDirectory::heard(int instance, const CacheReport& report) {
  const uint32_t tier = 1u << int(report.tier);
  for (uint64_t hash : report.removed)
    if (const auto at = blocks_.find(hash); at != blocks_.end() && removed(instance, at->second, tier))
      blocks_.erase(at);
  for (uint64_t hash : report.stored) stored(instance, hash, tier);
}

void CacheDirectory::stored(int instance, uint64_t hash, uint32_t tier) {
  Instance& held = instances_[size_t(instance)];
  const auto at = blocks_.find(hash);
  if (at != blocks_.end())
    if (const auto one = std::ranges::find(at->second, instance, &Holder::instance); one != at->second.end())
      return void(one->tiers |= tier);
  if (held.blocks >= held.capacity) return;
  ++held.blocks;
  blocks_[hash].push_back({instance, tier});
}

// The instance no longer has the block in these tiers (bits of Tier). True: no instance has it.
bool CacheDirectory::removed(int instance, Holders& holders, uint32_t tiers) {
  const auto one = std::ranges::find(holders, instance, &Holder::instance);
  if (one == holders.end() || (one->tiers &= ~tiers) != 0) return false;
  --instances_[size_t(instance)].blocks;
  holders.erase(one);
  return holders.empty();
}

std::span<const CacheDirectory::Hit> CacheDirectory::find(std::span<const uint64_t> hashes) {
  constexpr uint32_t kDevice = 1, kHost = 2;
  found_.assign(instances_.size(), {});
  for (int n = 0; n < int(hashes.size()); ++n) {
    const auto at = blocks_.find(hashes[size_t(n)]);
    if (at == blocks_.end()) break;
    bool any = false;
    for (const Holder& one : at->second) {
      Hit& hit = found_[size_t(one.instance)];
      if (hit.all != n) continue;
      any = true;
      hit.all = n + 1;
      if (hit.host == n && one.tiers & (kDevice | kHost)) hit.host = n + 1;
      if (hit.device == n && one.tiers & kDevice) hit.device = n + 1;
    }
    if (!any) break;
  }
  return found_;
}

}  // namespace xpyd::disagg
