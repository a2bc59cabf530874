// The subcommands that measure, simulate or read a server, and their options. server/main.cc joins them with the
// server's own; no other folder includes experiments/.
#pragma once

#include <span>
#include <vector>

#include "base/options/options.h"

namespace xpyd::server {

// Each takes its checked options and returns the exit code of the process, like those in server/cli/commands.h.
int bench_main(const Options& options);
int prefix_stats_main(const Options& options);
int simulate_main(const Options& options);
int replay_main(const Options& options);
int trace_main(const Options& options);
int explain_main(const Options& options);
int calibrate_main(const Options& options);

std::vector<OptionRow> bench_options();
std::vector<OptionRow> prefix_stats_options();
std::vector<OptionRow> simulate_options();
std::vector<OptionRow> event_log_options();  // replay, explain

// The rows of the server's table (server/build.h) and of these.
std::span<const OptionRow> all_options();

}  // namespace xpyd::server
