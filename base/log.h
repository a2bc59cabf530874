// What a process that serves says on stderr: lines with the time (UTC) and a level. Nobody waits
// for whoever reads them: what a full pipe does not take is dropped, and counted in the next line.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace xpyd {

enum class LogLevel : uint8_t { debug, info, warning, error };
LogLevel log_level(std::string_view name);  // of --log-level

// The least level of this process's lines. From here on stderr never blocks where it is a pipe or
// a terminal that can be opened again: opened anew, since others have that file, too.
void open_log(LogLevel least);

std::string log_stamp(LogLevel level);  // "2026-11-22T17:44:13.123Z info "
void log_text(std::string line);        // as it is, whatever its level; at most 4 KiB
// Lines without a stamp that somebody waits for: they wait a second for room, and are dropped then.
void say(std::string_view lines);
[[gnu::format(printf, 2, 3)]] void log_line(LogLevel level, const char* format, ...);

}  // namespace xpyd
