#include "server/result_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/version.h"

namespace xpyd {
namespace {

Error cannot_write(const std::string& path) {
  return {ErrorCode::io, "--json: cannot write " + path + ": " + std::strerror(errno)};
}

}  // namespace

nlohmann::json run_header(const Options& options) {
  nlohmann::json header = provenance();
  header["options"] = options.shown_values();
  return header;
}

Status check_writable(const std::string& path) {
  if (path.empty()) return ok();
  std::string trial = path + ".part";
  FILE* file = std::fopen(trial.c_str(), "wb");
  if (!file) return cannot_write(path);
  std::fclose(file);
  std::remove(trial.c_str());
  return ok();
}

Status write_json(const std::string& path, const nlohmann::json& json) {
  std::string text = json_text(json, 2) + "\n";
  std::string part = path + ".part";
  FILE* file = std::fopen(part.c_str(), "wb");
  if (!file) return cannot_write(path);
  bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  whole = std::fclose(file) == 0 && whole;
  if (whole && std::rename(part.c_str(), path.c_str()) == 0) return ok();
  Error error = cannot_write(path);
  std::remove(part.c_str());
  return error;
}

}  // namespace xpyd
