// serve --processes: a conductor in this process, and a worker process for each instance of
// --topology, started from the same program with the same options and started again when one dies.
#pragma once

#include <memory>

#include "base/clock.h"
#include "base/options.h"
#include "disagg/control/registry.h"
#include "disagg/service.h"
#include "disagg/worker.h"

namespace xpyd {

struct Stack;

// What a conductor and its workers have in common. The errors name the option.
Result<ClusterKey> read_cluster_key(const std::string& file);
Result<std::unique_ptr<Registry>> open_registry(const Options& options, Clock& clock);  // null: none is given

// Errors: the key file, the address.
Result<std::unique_ptr<Runtime>> make_local_workers(Stack& stack, const Options& options);

}  // namespace xpyd
