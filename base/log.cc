#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "base/status.h"

namespace xpyd {
namespace {

constexpr std::string_view kNames[] = {"debug", "info", "warning", "error"};
std::atomic<LogLevel> least = LogLevel::info;

}  // namespace

LogLevel log_level(std::string_view name) {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  XPYD_CHECK(found != std::end(kNames), std::string(name));
  return LogLevel(found - kNames);
}

void set_log_level(LogLevel level) { least = level; }

std::string log_stamp(LogLevel level) {
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  tm day{};
  gmtime_r(&time.tv_sec, &day);
  char stamp[64];
  const size_t n = std::strftime(stamp, sizeof stamp, "%FT%T", &day);
  std::snprintf(stamp + n, sizeof stamp - n, ".%03ldZ %s ", time.tv_nsec / 1000000, kNames[size_t(level)].data());
  return stamp;
}

void say(std::string lines) {
  if (!lines.ends_with('\n')) lines += '\n';
  [[maybe_unused]] const ssize_t written = write(2, lines.data(), lines.size());  // nobody can be told that it failed
}

void log_line(LogLevel level, const char* format, ...) {
  if (level < least) return;
  char text[4096];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  say(log_stamp(level) + text);
}

}  // namespace xpyd
