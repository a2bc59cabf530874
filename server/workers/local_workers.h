// serve --processes: a conductor in this process and one worker process for each instance of --topology. Workers run
// the same program with the same options and are started again when they die.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/options/options.h"
#include "disagg/processes/process_cluster.h"
#include "disagg/processes/registry.h"
#include "disagg/processes/worker.h"
#include "disagg/service.h"

namespace xpyd::server {

struct Build;

// The options that a conductor and its workers share.
struct ProcessOptions {
  std::string bind;          // address of the conductor; empty: a socket in a private folder
  std::string key_file;      // empty: none is given
  std::string registry_url;  // empty: none is given
  double lease_s = 3;
  bool start_workers = true;  // false: workers are started elsewhere and join
  // Both throw an Error that names the option.
  ClusterKey read_key() const;
  std::unique_ptr<Registry> open_registry(Clock& clock) const;  // null: none is given
};

// Errors: the key file, the address.
Result<std::unique_ptr<Runtime>> make_local_workers(Build& build, const Options& options);

inline constexpr double kRegistryTtlSeconds = 5;

// Opens "etcd://HOST:PORT[/prefix]"; the default prefix is "xpyd". `ttl_s`: how long the names of a dead process stay,
// at least 2. Does not wait for etcd: state() tells whether etcd answers.
Result<std::unique_ptr<Registry>> open_etcd(const std::string& url, double ttl_s, Clock& clock);

}  // namespace xpyd::server
