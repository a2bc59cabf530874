// The log of a serving process: lines on stderr with a UTC time and a level. No thread waits for the reader of stderr,
// except in say(). Lines that a full pipe does not take are dropped, and the next line counts them. Thread safety: any
// thread, after open_log().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace xpyd {

enum class LogLevel : uint8_t { debug, info, warning, error };
LogLevel log_level(std::string_view name);  // of --log-level

// Sets the lowest level that is logged. From here on stderr does not block if it is a pipe or a terminal that can be
// opened again: it is opened anew, because other processes share the old file description.
void open_log(LogLevel least);

std::string log_stamp(LogLevel level);  // "2026-11-22T17:44:13.123Z info "
void log_text(std::string line);        // written as it is, at any level; at most 4 KiB
// Writes lines without a stamp for which a user waits: each waits up to a second for room before it is dropped.
void say(std::string_view lines);
[[gnu::format(printf, 2, 3)]] void log_line(LogLevel level, const char* format, ...);

}  // namespace xpyd
