// Child processes that run this same program: workers of `serve --processes`, stages of a worker.
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

// Returns "xpyd worker" and those of the given options that a worker takes, except `without`.
Command worker_command(const Options& options, std::span<const std::string_view> without);

// Starts a child in a process group of its own, so that Ctrl-C at the terminal reaches only the parent. The child
// inherits no file but stderr. An inherited socket would keep the port and every client after this process has ended;
// an inherited stdout would keep its reader waiting.
Result<pid_t> spawn_self(Command command);

// Sends SIGTERM, waits at most `seconds`, then kills. `look` sets the pids of ended children to -1.
void end_all(std::vector<pid_t>& pids, double seconds, const std::function<void()>& look);

}  // namespace xpyd::server
