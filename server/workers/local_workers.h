// serve --processes: a conductor in this process and one worker process for each instance of --topology. Workers run
// the same program with the same options and are started again when they die.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

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

struct SupervisorOptions {
  bool restart = true;
  // A child that ended is started again after first_wait_s. The wait doubles with each further end, up to
  // longest_wait_s, and there is no last attempt. A child that has served for longest_wait_s starts over with
  // first_wait_s.
  double first_wait_s = 0.1, longest_wait_s = 10;
  // A child is killed if it is stopped, or lost its channel, for silence_s, or if it does not serve within start_s
  // after its start or after its channel opened.
  double silence_s = 12, start_s = 600;
};

// Decides which child processes to start, start again and kill, and when. Time and the observed state of each child are
// arguments; make_local_workers owns the processes. Thread safety: none.
class Supervisor {
 public:
  struct Orders {
    std::vector<size_t> start, kill;
  };

  Supervisor(const SupervisorOptions& options, size_t n_children) : options_(options), children_(n_children) {}

  // Call regularly, several times a second. seen[i] is read for running children only. Orders that are not reported as
  // done are given again.
  Orders look(std::span<const Presence> seen, double now);
  void started(size_t child, double now);
  // Reports that a child ended or could not be started. Returns the seconds until its next start; none: it was
  // `retired` and never starts again.
  std::optional<double> ended(size_t child, bool retired, double now);

 private:
  struct Child {
    enum { waiting, running, gone } state = waiting;
    double start_at_s = 0;             // used while waiting
    int ends = 0;                      // consecutive ends
    Presence seen = Presence::absent;  // used while running
    bool had_channel = false;
    double since_s = 0;  // since when `seen` holds
  };
  const SupervisorOptions options_;
  std::vector<Child> children_;
  std::optional<double> looked_s_;
};

inline constexpr double kRegistryTtlSeconds = 5;

// Opens "etcd://HOST:PORT[/prefix]"; the default prefix is "xpyd". `ttl_s`: how long the names of a dead process stay,
// at least 2. Does not wait for etcd: state() tells whether etcd answers.
Result<std::unique_ptr<Registry>> open_etcd(const std::string& url, double ttl_s, Clock& clock);

}  // namespace xpyd::server
