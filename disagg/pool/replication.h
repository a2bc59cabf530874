// Replication of prefixes: whether an instance keeps a fetched prefix in its cache for other prompts. Copies of popular
// prefixes save fetches. Other copies evict blocks that only one instance has.
//
// Thread safety: the conductor locks PrefixHeat. The rest are pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace xpyd::disagg {

// The popularity of the first block that would be fetched.
struct ReplicationView {
  double reads_s = 0;  // prompts per second that read it, over the last window
  int replicas = 0;    // instances that have it and compute prompts (a D's copy saves no fetch)
};

struct ReplicationPolicy {
  const char* name;
  bool (*keeps)(const ReplicationView& view);
  bool by_heat;  // reads are counted
  const char* source;
};

std::span<const ReplicationPolicy> replication_policies();
const ReplicationPolicy* find_replication_policy(std::string_view name);  // null: no such policy

// Reads per block in the last ten seconds: a count-min sketch (Cormode and Muthukrishnan, 2005) of this window and one
// of the window before, of which the share within ten seconds counts. It never undercounts. In less than 2 % of cases
// (e^-4) it overcounts by more than e / 65,536 of a window's reads.
class PrefixHeat {
 public:
  static constexpr double kWindowSeconds = 10;  // as in Mooncake's Store: master_config.h
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
