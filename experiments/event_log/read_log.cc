#include "experiments/event_log/read_log.h"

#include <fstream>

#include "base/log.h"
#include "disagg/conductor/event_log.h"

namespace xpyd::disagg {
namespace {

Status read_event_log(const std::string& path, bool alone,
                      const std::function<void(const std::string& text, const nlohmann::json& line)>& line) {
  std::ifstream file(path);
  if (!file) return Error{ErrorCode::not_found, path + ": the file cannot be read"};
  std::string text;
  for (int64_t number = 1; std::getline(file, text) || number == 1; ++number) {
    const std::string where = path + ":" + std::to_string(number) + ": ";
    Result<nlohmann::json> parsed = parse_json(text, where);
    if (!parsed && file.eof() && (number > 1 || !alone)) {
      log_line(LogLevel::warning, "xpyd: %sthe last line is incomplete and ignored", where.c_str());
      break;
    }
    if (!parsed) return parsed.error();
    try {
      if (number > 1)
        line(text, parsed.value());
      else if (parsed.value().value("xpyd_event_log", 0) != kEventLogVersion)
        return invalid(where + "this is not an event log of version " + std::to_string(kEventLogVersion));
    } catch (const std::exception& e) {
      return invalid(where + e.what());
    }
  }
  return file.bad() ? Status(Error{ErrorCode::unavailable, path + ": reading the file failed"}) : ok();
}

}  // namespace

Status read_event_logs(std::span<const std::string> paths,
                       const std::function<void(const std::string& text, const nlohmann::json& line)>& line) {
  if (paths.empty()) return invalid("expected FILE, an event log, as an argument");
  for (const std::string& path : paths)
    if (Status read = read_event_log(path, paths.size() == 1, line); !read) return read;
  return ok();
}

}  // namespace xpyd::disagg
