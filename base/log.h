// The log of a serving process: lines on stderr with a UTC time and a level. Each line is one write(2). Thread safety: any
// thread, after set_log_level().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace xpyd {

enum class LogLevel : uint8_t { debug, info, warning, error };
LogLevel log_level(std::string_view name);  // of --log-level
void set_log_level(LogLevel least);         // the lowest level that is logged

std::string log_stamp(LogLevel level);  // "2026-11-22T17:44:13.123Z info "
void say(std::string lines);            // writes them as they are, at any level, and ends the last one
[[gnu::format(printf, 2, 3)]] void log_line(LogLevel level, const char* format, ...);

}  // namespace xpyd
