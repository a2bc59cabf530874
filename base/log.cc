#include "base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "base/status.h"

namespace xpyd {
namespace {

constexpr std::string_view kNames[] = {"debug", "info", "warning", "error"};
std::atomic<LogLevel> least = LogLevel::info;
std::atomic<int64_t> dropped = 0;

// Writes at most PIPE_BUF bytes, which a pipe takes as a whole or not at all.
bool put(std::string line) {
  line.resize(std::min<size_t>(line.size(), PIPE_BUF - 1));
  line += '\n';
  ssize_t n = send(2, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0 && errno == ENOTSOCK) {
    pollfd room{2, POLLOUT, 0};  // it may still block: another user's pipe cannot be opened anew
    n = poll(&room, 1, 0) > 0 ? write(2, line.data(), line.size()) : -1;
  }
  return n >= 0;
}

}  // namespace

LogLevel log_level(std::string_view name) {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  XPYD_CHECK(found != std::end(kNames), std::string(name));
  return LogLevel(found - kNames);
}

void open_log(LogLevel level) {
  least = level;
  struct stat about {};
  if (fstat(2, &about) != 0 || !(S_ISFIFO(about.st_mode) || isatty(2))) return;
  const int own = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (own < 0) return;
  dup2(own, 2);
  close(own);
}

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

void log_text(std::string line) {
  const int64_t missing = dropped.exchange(0);
  const bool told = missing == 0 ||
                    put(log_stamp(LogLevel::warning) + "stderr was full: dropped_lines=" + std::to_string(missing));
  if (!told) dropped += missing;
  if (!told || !put(std::move(line))) ++dropped;
}

void say(std::string_view lines) {
  for (int wait_ms = 1000; !lines.empty();) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    pollfd room{2, POLLOUT, 0};
    poll(&room, 1, wait_ms);
    const std::string line(lines.substr(0, end));
    if (!put(line) && !put(line)) ++dropped, wait_ms = 0;  // a single failed write is tried again
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
}

void log_line(LogLevel level, const char* format, ...) {
  if (level < least) return;
  char text[PIPE_BUF];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  log_text(log_stamp(level) + text);
}

}  // namespace xpyd
