// The subcommands: each takes its checked options and returns the exit code of the process. 0:
// done; 1: it ran and failed; 2: it was asked for something that it cannot do (misuse).
#pragma once

#include <string>

#include "base/log.h"
#include "base/options.h"

namespace xpyd {

// Says why it ends; the exit code for that, or `code`.
inline int fail(const char* who, const Error& error, int code = 0) {
  say("xpyd" + std::string(who) + ": " + error.message);
  return code ? code : error.code == ErrorCode::invalid_argument ? 2 : 1;
}

int tour_main(const Options& options);
int serve_main(const Options& options);
int worker_main(const Options& options);
int generate_main(const Options& options);
int bench_main(const Options& options);
int peak_main(const Options& options);
int info_main(const Options& options);
int prefix_stats_main(const Options& options);
int export_main(const Options& options);

}  // namespace xpyd
