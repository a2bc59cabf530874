// Which prefixes may be in several places: whether what an instance fetches for one prompt stays in its cache for
// others. Copies of what is asked for often save fetches; copies of all else push out what only one instance has.
//
// Thread safety: PrefixHeat none, the conductor locks; the rest are pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace xpyd::disagg {

// Of the first block of a prefix that one instance is to get.
struct ReplicationView {
  double reads_s = 0;  // prompts a second that began with it, over the last window
  int replicas = 0;    // instances that have it and compute prompts: what a D keeps of its answers spares no fetch
};

struct ReplicationPolicy {
  const char* name;
  bool (*keeps)(const ReplicationView& view);
  bool by_heat;  // reads are counted
  const char* source;
};

std::span<const ReplicationPolicy> replication_policies();
const ReplicationPolicy* find_replication_policy(std::string_view name);  // null: no such policy

// How often blocks were read in the last ten seconds: a count-min sketch (Cormode and Muthukrishnan, 2005) of this
// window and of the one before it, which counts for the part of it that is not over. Never too few; too many by more
// than e / 65,536 of all reads of a window in less than 2 % of cases (e^-4).
class PrefixHeat {
 public:
  static constexpr double kWindowSeconds = 10;  // Mooncake's Store: master_config.h
  void read(std::span<const uint64_t> blocks, double now_s);
  double reads_s(uint64_t block, double now_s);

 private:
  static constexpr int kRows = 4, kColumnBits = 16;
  using Counts = std::vector<uint32_t>;  // [kRows << kColumnBits]
  static std::array<size_t, kRows> places(uint64_t block);
  void advance(double now_s);

  Counts now_ = Counts(size_t(kRows) << kColumnBits), before_ = now_;
  double since_s_ = 0;
};

}  // namespace xpyd::disagg
