// Where a model's files are: a folder on disk, or inside this binary, which carries the demo model
// (model/demo, made by experiments/demo_model).
//
// Thread safety: plain functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd::model {

// Stands for a folder wherever one is asked for; its last component is the model's name.
inline constexpr const char* kDemoModel = "embedded:/xpyd-demo";

// The bytes of an embedded file; nothing for a path outside kDemoModel or a name that is not there.
std::optional<std::string_view> embedded_file(std::string_view path);
bool is_embedded(std::string_view path);  // kDemoModel, or inside it

// Whether a model can be there; the error says what is, of the forms that are no Hugging Face
// folder. `with_weights`: they will be read.
Status check_model_folder(const std::string& dir, bool with_weights);
bool has_model_file(const std::string& path);
// A whole small file, from either place; errors are those of read_small_file.
Result<std::string> read_model_file(const std::string& path, size_t max_bytes);

// Writes the demo model into `dir`, which is new or empty: no file that is there is touched.
Status export_demo(const std::string& dir);
// A copy of it in this user's cache folder ($XDG_CACHE_HOME or ~/.cache, in xpyd/), made when it is
// not there. The error: what is in the way, which stays as it is.
Result<std::string> cached_demo();

}  // namespace xpyd::model
