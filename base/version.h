// What a result must say of how it came about: program, commit, build, machine, date.
#pragma once

#include <map>
#include <string>

namespace xpyd {

const char* version();     // "0.1.0"
const char* commit();      // of the tree it was built from, "-dirty" with changes; "unknown" outside git
const char* build_mode();  // "release", "asan", …
std::string machine();     // "AMD EPYC …, 2 cores"
std::string utc_date();    // "2025-01-31T12:00:00Z"

// The above as "xpyd …" lines' parts, by name: version, commit, build, machine, date.
std::map<std::string, std::string> provenance();

}  // namespace xpyd
