#include "disagg/conductor/event_log.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace xpyd::disagg {

Result<std::unique_ptr<EventLog>> EventLog::create(const std::string& path, const std::string& options) {
  std::FILE* const file = std::fopen(path.c_str(), "we");
  if (!file) return Error{ErrorCode::unavailable, "event log " + path + ": " + strerror(errno)};
  std::unique_ptr<EventLog> log(new EventLog(path, file));
  JsonText json;
  json.open('{').add("xpyd_event_log", kEventLogVersion).key("options").raw(options).close('}');
  log->write(json.take());
  if (log->file_ && std::fflush(log->file_) != 0) log->give_up();  // so a killed process leaves a readable log
  return log;
}

EventLog::~EventLog() {
  if (!file_) return;
  if (std::fflush(file_) == 0)
    std::fclose(file_);
  else
    give_up();
}

void EventLog::give_up() {
  log_line(LogLevel::error, "xpyd: event log %s: %s; the log ends here, but the server continues", path_.c_str(),
           strerror(errno));
  std::fclose(std::exchange(file_, nullptr));
}

void EventLog::write(std::string line) {
  line += '\n';
  std::lock_guard lock(mutex_);
  if (file_ && std::fwrite(line.data(), 1, line.size(), file_) != line.size()) give_up();
}

}  // namespace xpyd::disagg
