// serve --processes: a conductor in this process, and a worker process for each instance of
// --topology, started from the same program with the same options and started again when one dies.
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

struct Stack;

// What a conductor and its workers have in common.
struct ProcessOptions {
  std::string bind;          // where the conductor listens; empty: a socket in a private folder
  std::string key_file;      // empty: none is given
  std::string registry_url;  // likewise
  double lease_s = 3;
  bool start_workers = true;  // off: they are started elsewhere, and join
  // Their Errors, which name the option, are thrown.
  ClusterKey read_key() const;
  std::unique_ptr<Registry> open_registry(Clock& clock) const;  // null: none is given
};

// Errors: the key file, the address.
Result<std::unique_ptr<Runtime>> make_local_workers(Stack& stack, const Options& options);

struct SupervisorOptions {
  bool restart = true;
  // A child that ends is started again after first_wait_s, twice as long after each end that
  // follows, and longest_wait_s at most, for ever. Who has served for longest_wait_s begins anew.
  double first_wait_s = 0.1, longest_wait_s = 10;
  // Killed: who is alive, but without a channel for silence_s, though it had one (it hangs) or is
  // stopped; who does not serve start_s after its start, or after its channel came.
  double silence_s = 12, start_s = 600;
};

// Which child processes are to be started, started again, and killed, and when: decisions alone. Time, and what is seen
// of each child, are arguments; the processes are make_local_workers's. Thread safety: none.
class Supervisor {
 public:
  struct Orders {
    std::vector<size_t> start, kill;
  };

  Supervisor(const SupervisorOptions& options, size_t n_children) : options_(options), children_(n_children) {}

  // To be asked every so often, much less than a second; seen[i] counts for children that run.
  // What is ordered and not told as done is ordered again.
  Orders look(std::span<const Presence> seen, double now);
  void started(size_t child, double now);
  // Or could not be started. Seconds until it is started again; none: never, it was `retired`.
  std::optional<double> ended(size_t child, bool retired, double now);

 private:
  struct Child {
    enum { waiting, running, gone } life = waiting;
    double start_at_s = 0;             // waiting
    int ends = 0;                      // one after the other
    Presence seen = Presence::absent;  // running
    bool had_channel = false;
    double since_s = 0;  // so seen
  };
  const SupervisorOptions options_;
  std::vector<Child> children_;
  std::optional<double> looked_s_;
};

inline constexpr double kRegistryTtlSeconds = 5;

// "etcd://HOST:PORT[/prefix]"; without a prefix "xpyd". `ttl_s`: how long a dead process's names
// stay, at least 2. Does not wait for etcd: state() says whether it is there.
Result<std::unique_ptr<Registry>> open_etcd(const std::string& url, double ttl_s, Clock& clock);

}  // namespace xpyd::server
