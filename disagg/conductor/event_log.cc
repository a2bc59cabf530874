#include "disagg/conductor/event_log.h"

#include <fcntl.h>
#include <stdio_ext.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/log.h"

namespace xpyd::disagg {

Result<std::unique_ptr<EventLog>> EventLog::create(const std::string& path, int64_t max_bytes,
                                                   const std::string& options) {
  // The file type is checked before the file is emptied: a device, a pipe or a socket is not a log.
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
  if (fd < 0) return Error{ErrorCode::unavailable, "event log " + path + ": " + strerror(errno)};
  struct stat about {};
  if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode) || ftruncate(fd, 0) != 0) {
    close(fd);
    return Error{ErrorCode::invalid_argument, "event log " + path + ": this is not a regular file"};
  }
  std::unique_ptr<EventLog> log(new EventLog(path, fdopen(fd, "w"), max_bytes));
  JsonText json;
  json.open('{').add("xpyd_event_log", kEventLogVersion).key("options").raw(options).close('}');
  log->write(json.take());
  if (log->file_ && std::fflush(log->file_) != 0) log->give_up();  // so a killed process leaves a readable log
  return log;
}

EventLog::~EventLog() {
  if (!file_) return;
  if (dropped_ > 0) std::fprintf(file_, "{\"e\":\"left_out\",\"lines\":%lld}\n", static_cast<long long>(dropped_));
  if (std::fflush(file_) == 0)
    std::fclose(file_);
  else
    give_up();
}

// The buffered lines are discarded, because they would follow a gap.
void EventLog::give_up() {
  log_line(LogLevel::error, "xpyd: event log %s: %s; the log ends here, but the server continues", path_.c_str(),
           strerror(errno));
  __fpurge(file_);
  std::fclose(std::exchange(file_, nullptr));
}

void EventLog::begin(JsonText& json, double now_s, const char* kind, const char* policy, uint64_t request) {
  json.open('{').add("t", now_s, "e", kind, "policy", policy, "request", request);
}

void EventLog::write(std::string line) {
  line += '\n';
  std::lock_guard lock(mutex_);
  if (!file_) return;
  if (dropped_ > 0 || int64_t(line.size()) > left_) {  // a log has no gap before its end
    ++dropped_;
    return;
  }
  left_ -= int64_t(line.size());
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size()) give_up();
}

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
