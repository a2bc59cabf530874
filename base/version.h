// The origin of a result: program, commit, build, machine, date.
//
// Thread safety: plain functions.
#pragma once

#include <map>
#include <string>

namespace xpyd {

const char* version();     // "0.1.0"
const char* commit();      // of the source tree, with "-dirty" if it had changes; "unknown" outside git
const char* build_mode();  // "release", "asan", …
std::string machine();     // "AMD EPYC …, 2 cores"
std::string utc_date();    // "2025-01-31T12:00:00Z"

// The above by name: version, commit, build, machine, date.
std::map<std::string, std::string> provenance();

}  // namespace xpyd
