// Finds a model's files in a folder on disk or inside this binary. The binary carries the demo model (model/demo, made
// by experiments/demo_model).
//
// Thread safety: plain functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd::model {

// Names the demo model wherever a folder is expected; the last component is the model's name.
inline constexpr const char* kDemoModel = "embedded:/xpyd-demo";

// Returns an embedded file's bytes, or nothing if `path` is outside kDemoModel or names no file.
std::optional<std::string_view> embedded_file(std::string_view path);
bool is_embedded(std::string_view path);  // true for kDemoModel and paths inside it

// Succeeds if the folder exists, on disk or in the binary. Readers of its files name a file that is missing.
Status check_model_folder(const std::string& dir);
// True if the file exists on disk or in the binary.
bool has_model_file(const std::string& path);
// Reads a whole small file from disk or from the binary. Errors are those of read_small_file.
Result<std::string> read_model_file(const std::string& path, size_t max_bytes);

// Writes the demo model into `dir`, which must be new or empty. Existing files stay untouched.
Status export_demo(const std::string& dir);

}  // namespace xpyd::model
