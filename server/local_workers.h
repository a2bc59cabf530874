// serve --processes: a conductor in this process, and a worker process for each instance of
// --topology, started from the same program with the same options and started again when one dies.
#pragma once

#include <memory>

#include "base/options.h"
#include "disagg/service.h"

namespace xpyd {

struct Stack;

// Errors: the key file, the address.
Result<std::unique_ptr<Runtime>> make_local_workers(const Stack& stack, const Options& options);

}  // namespace xpyd
