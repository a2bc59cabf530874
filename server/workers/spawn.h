// Child processes from this very program: workers of `serve --processes`, stages of a worker.
#pragma once

#include <sys/types.h>

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/options/options.h"
#include "base/status.h"

namespace xpyd::server {

using Command = std::vector<std::string>;

// "xpyd worker" and of these options those that were given and are a worker's, but for some.
Command worker_command(const Options& options, std::span<const std::string_view> without);

// In a process group of its own: a Ctrl-C at the terminal is the parent's to handle. It gets none of this process's
// files but `said` as its stderr: a socket that it kept would hold the port and every client after this process has
// ended, a stdout whoever reads it.
Result<pid_t> spawn_self(Command command, int said);

// Tells them to end, gives them `seconds` for it, then ends them. `look` notices who has ended, and makes its pid -1.
void end_all(std::vector<pid_t>& pids, double seconds, const std::function<void()>& look);

}  // namespace xpyd::server
