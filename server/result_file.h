// Result files: JSON that says how it came about.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/options.h"
#include "base/status.h"

namespace xpyd {

// {"version", "commit", "build", "machine", "date", "options": {name: value}}; secrets are masked.
nlohmann::json run_header(const Options& options);

// An error when FILE cannot be written, found before a long run rather than after. "" is fine.
Status check_writable(const std::string& path);

// Replaces the file as a whole. Bytes that are not UTF-8 become U+FFFD.
Status write_json(const std::string& path, const nlohmann::json& json);

}  // namespace xpyd
