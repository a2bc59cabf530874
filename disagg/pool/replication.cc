#include "disagg/pool/replication.h"

#include <algorithm>
#include <utility>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

constexpr ReplicationPolicy kReplications[] = {
    {"side_effect", [](const ReplicationView&) { return true; }, false,
     "Mooncake (FAST '25), Algorithm 1, lines 20-22"},
    {"heat", [](const ReplicationView& view) { return view.reads_s >= 0.8 && view.replicas < 2; }, true,
     "Mooncake's Store, dynamic_replication_mode: 0.8 reads a second, two replicas at most"},
    {"off", [](const ReplicationView&) { return false; }, false, "a prefix stays where it was computed"},
};

}  // namespace

std::span<const ReplicationPolicy> replication_policies() { return kReplications; }
const ReplicationPolicy* find_replication_policy(std::string_view name) { return find_row(kReplications, name); }

std::array<size_t, PrefixHeat::kRows> PrefixHeat::places(uint64_t block) {
  std::array<size_t, kRows> places;
  for (size_t row = 0; row < kRows; ++row) {
    constexpr uint64_t kOdd[kRows] = {0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0xd6e8feb86659fd93};
    places[row] = row << kColumnBits | size_t(block * kOdd[row] >> (64 - kColumnBits));
  }
  return places;
}

void PrefixHeat::advance(double now_s) {
  if (now_s < since_s_ + kWindowSeconds) return;
  const bool next = now_s < since_s_ + 2 * kWindowSeconds;
  std::swap(before_, now_);
  std::ranges::fill(now_, 0);
  if (!next) std::ranges::fill(before_, 0);
  since_s_ = next ? since_s_ + kWindowSeconds : now_s;
}

void PrefixHeat::read(std::span<const uint64_t> blocks, double now_s) {
  advance(now_s);
  for (const uint64_t block : blocks)
    for (const size_t place : places(block)) ++now_[place];
}

double PrefixHeat::reads_s(uint64_t block, double now_s) {
  advance(now_s);
  uint32_t now = UINT32_MAX, before = UINT32_MAX;
  for (const size_t place : places(block)) now = std::min(now, now_[place]), before = std::min(before, before_[place]);
  return now / kWindowSeconds + before / kWindowSeconds * (1 - (now_s - since_s_) / kWindowSeconds);
}

}  // namespace xpyd::disagg
