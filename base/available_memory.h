// Whether this machine has memory, asked before it is touched: afterwards the kernel ends a program
// where a message was due.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace xpyd {

// Error `unavailable`: the machine has not that much left (MemAvailable).
Status check_available_memory(size_t bytes);

}  // namespace xpyd
