// The subcommands. Each takes its checked options and returns the exit code of the process. 0: done. 1: it ran and
// failed. 2: misuse, it was asked for something that it cannot do. 128 + N: signal N ended it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/log.h"
#include "base/options/options.h"
#include "base/status.h"

namespace xpyd::server {

// Prints why the command ends. Returns `code`, or, if that is 0, the exit code that suits the error.
inline int fail(const char* who, const Error& error, int code = 0) {
  say("xpyd" + std::string(who) + ": " + error.message);
  return code ? code : error.code == ErrorCode::invalid_argument ? 2 : 1;
}

// ---- Result files (--json): JSON with the conditions of the run.
//
// Returns {"version", "commit", "build", "machine", "date", "options": {name: value}}. Secrets are masked.
nlohmann::json run_header(const Options& options);
// Checks before a long run that the result file can be written.
Status check_result_file(const Options& options);
// Replaces the whole file, with run_header() as "run". Does nothing without --json. Bytes that are not UTF-8 become
// U+FFFD.
Status write_result_file(const Options& options, nlohmann::json result);

int tour_main(const Options& options);
int serve_main(const Options& options);
int worker_main(const Options& options);
int generate_main(const Options& options);
int peak_main(const Options& options);
int info_main(const Options& options);
int export_main(const Options& options);

}  // namespace xpyd::server
