// serve --processes: a conductor in this process, and a worker process for each instance of
// --topology, started from the same program with the same options and started again when one dies.
#pragma once

#include <memory>

#include "base/clock.h"
#include "base/options.h"
#include "disagg/control/registry.h"
#include "disagg/service.h"
#include "disagg/worker.h"

namespace xpyd::server {

struct Stack;

// What a conductor and its workers have in common.
struct ProcessOptions {
  std::string bind;          // where the conductor listens; empty: a socket in a private folder
  std::string key_file;      // empty: none is given
  std::string registry_url;  // likewise
  double lease_s = 3;
  // The errors name the option.
  Result<ClusterKey> read_key() const;
  Result<std::unique_ptr<Registry>> open_registry(Clock& clock) const;  // null: none is given
};

// Errors: the key file, the address.
Result<std::unique_ptr<Runtime>> make_local_workers(Stack& stack, const Options& options);

}  // namespace xpyd::server
