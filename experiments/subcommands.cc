#include "experiments/subcommands.h"

#include "server/build.h"

namespace xpyd::server {

std::span<const OptionRow> all_options() {
  static const std::vector<OptionRow> rows = [] {
    std::vector<OptionRow> joined(option_table().begin(), option_table().end());
    for (const auto& more : {bench_options(), prefix_stats_options(), simulate_options(), event_log_options()})
      joined.insert(joined.end(), more.begin(), more.end());
    return joined;
  }();
  return rows;
}

}  // namespace xpyd::server
