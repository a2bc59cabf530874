#include "server/commands.h"

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/json.h"
#include "base/version.h"
#include "model/folder.h"

namespace xpyd::server {
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

Status check_result_file(const Options& options) {
  const std::string& path = options.text("json");
  return path.empty() ? ok() : of_option(check_replaceable(path));
}

Status write_result_file(const Options& options, nlohmann::json result) {
  const std::string& path = options.text("json");
  if (path.empty()) return ok();
  result["run"] = run_header(options);
  return of_option(replace_file(path, json_text(result, 2) + "\n"));
}

// xpyd export DIR: the demo model inside this binary as a folder, from which clients load a tokenizer.
int export_main(const Options& options) {
  if (options.positional().empty()) return fail(": export", invalid("expected DIR, a new or an empty folder"));
  const Status written = export_demo(options.positional()[0]);
  return written ? 0 : fail(": export", written.error());
}

}  // namespace xpyd::server
