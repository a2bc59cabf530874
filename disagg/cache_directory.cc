#include "disagg/cache_directory.h"

#include "base/status.h"

namespace xpyd::disagg {

int CacheDirectory::joined(int capacity_blocks) {
  auto free = std::ranges::find(instances_, false, &Held::there);
  if (free == instances_.end()) free = instances_.insert(free, Held{});
  *free = {.capacity = std::min(size_t(capacity_blocks), kMost), .there = true};
  const auto number = int(free - instances_.begin());
  XPYD_CHECK(number <= UINT16_MAX);
  return number;
}

void CacheDirectory::left(int instance) {
  for (auto block = holders_.begin(); block != holders_.end();) forget(block++, instance);
  instances_[size_t(instance)].there = false;
}

void CacheDirectory::forget(std::unordered_map<uint64_t, std::vector<uint16_t>>::iterator block, int instance) {
  if (std::erase(block->second, uint16_t(instance)) == 0) return;
  --instances_[size_t(instance)].blocks;
  if (block->second.empty()) holders_.erase(block);
}

void CacheDirectory::heard(int instance, const CacheReport& report) {
  for (uint64_t hash : report.removed)
    if (auto block = holders_.find(hash); block != holders_.end()) forget(block, instance);
  Held& held = instances_[size_t(instance)];
  for (uint64_t hash : report.stored) {
    if (held.blocks >= held.capacity) return;
    std::vector<uint16_t>& holders = holders_[hash];
    if (std::ranges::find(holders, uint16_t(instance)) != holders.end()) continue;
    holders.push_back(uint16_t(instance));
    ++held.blocks;
  }
}

std::span<const int> CacheDirectory::find(std::span<const uint64_t> hashes) {
  found_.assign(instances_.size(), 0);
  for (size_t i = 0; i < hashes.size(); ++i) {
    const auto block = holders_.find(hashes[i]);
    if (block == holders_.end()) break;
    bool any = false;
    for (uint16_t holder : block->second)
      if (found_[holder] == int(i)) found_[holder] = int(i) + 1, any = true;
    if (!any) break;
  }
  return found_;
}

}  // namespace xpyd::disagg
