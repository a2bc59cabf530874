// The subcommands: each takes its checked options and returns the exit code of the process. 0:
// done; 1: it ran and failed; 2: it was asked for something that it cannot do (misuse).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/log.h"
#include "base/options/options.h"
#include "base/status.h"

namespace xpyd::server {

// Says why it ends; the exit code for that, or `code`.
inline int fail(const char* who, const Error& error, int code = 0) {
  say("xpyd" + std::string(who) + ": " + error.message);
  return code ? code : error.code == ErrorCode::invalid_argument ? 2 : 1;
}

// Result files (--json): JSON that says how it came about.
//
// {"version", "commit", "build", "machine", "date", "options": {name: value}}; secrets are masked.
nlohmann::json run_header(const Options& options);
// An error when the file cannot be written, found before a long run rather than after.
Status check_result_file(const Options& options);
// Replaces the file as a whole, with run_header() as "run"; nothing where none is asked for. Bytes
// that are not UTF-8 become U+FFFD.
Status write_result_file(const Options& options, nlohmann::json result);

int tour_main(const Options& options);
int serve_main(const Options& options);
int worker_main(const Options& options);
int generate_main(const Options& options);
int peak_main(const Options& options);
int info_main(const Options& options);
int export_main(const Options& options);

}  // namespace xpyd::server
