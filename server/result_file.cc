#include "server/result_file.h"

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/json.h"
#include "base/version.h"

namespace xpyd {
namespace {

Status of_option(const Status& status) {
  if (status) return status;
  return Error{status.error().code, "--json: " + status.error().message};
}

}  // namespace

nlohmann::json run_header(const Options& options) {
  nlohmann::json header = provenance();
  header["options"] = options.shown_values();
  return header;
}

Status check_writable(const std::string& path) { return path.empty() ? ok() : of_option(check_replaceable(path)); }

Status write_json(const std::string& path, const nlohmann::json& json) {
  return of_option(replace_file(path, json_text(json, 2) + "\n"));
}

}  // namespace xpyd
