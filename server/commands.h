// The subcommands: each takes its checked options and returns the exit code of the process. 0:
// done; 1: it ran and failed; 2: it was asked for something that it cannot do (misuse).
#pragma once

#include "base/options.h"

namespace xpyd {

int serve_main(const Options& options);
int worker_main(const Options& options);
int generate_main(const Options& options);
int bench_main(const Options& options);
int peak_main(const Options& options);
int info_main(const Options& options);
int prefix_stats_main(const Options& options);
int export_main(const Options& options);

}  // namespace xpyd
