// xpyd worker: one instance in a process of its own. It joins a conductor (`xpyd serve
// --processes`), serves, and joins again when that was restarted. The first SIGTERM drains, the
// second ends it.
#include <cstdio>
#include <mutex>

#include "base/log.h"
#include "server/commands.h"
#include "server/local_workers.h"
#include "server/signals.h"
#include "server/stack.h"

namespace xpyd::server {

int worker_main(const Options& options) {
  SignalThread signals;
  Result<std::unique_ptr<Stack>> prepared = prepare_stack(options);
  if (!prepared) return fail(" worker", prepared.error());
  Stack& stack = *prepared.value();
  WorkerOptions worker_options{.fingerprint = fingerprint(stack)};
  options.fill(worker_options);
  ProcessOptions cluster;
  options.fill(cluster);
  if (!cluster.key_file.empty()) {
    Result<ClusterKey> key = cluster.read_key();
    if (!key) return fail(" worker", key.error());
    worker_options.key = key.value();
  }
  struct Found {
    std::mutex mutex;
    std::string address;
  } found;  // by the registry, below
  Result<std::unique_ptr<Registry>> registry = cluster.open_registry(stack.clock);
  if (!registry) return fail(" worker", registry.error());
  if (registry.value()) {
    registry.value()->watch(kConductorName, [&found](const Registry::Entries& entries) {
      auto entry = entries.find(kConductorName);
      std::lock_guard lock(found.mutex);
      found.address = entry == entries.end() ? "" : entry->second;
    });
    worker_options.find_conductor = [&found] {
      std::lock_guard lock(found.mutex);
      return found.address;
    };
  }
  if (Status opened = open_backend(stack); !opened) return fail(" worker", opened.error());
  worker_options.cluster = stack.options;
  const std::string& bind = worker_options.listen;
  if (!bind.starts_with("unix:")) {
    std::string host = bind.substr(0, bind.rfind(':'));
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    worker_options.cluster.wire_host = host;
  }
  Worker worker(std::move(worker_options), stack.clock);
  signals.handle([&worker](int count) {
    log_line(LogLevel::info, "xpyd worker: %s", count > 1 ? "stopping" : "leaving; a second signal ends it at once");
    if (count > 1)
      worker.stop();
    else
      worker.leave();
  });
  const Status served = worker.run();
  signals.finish();
  return served ? 0 : fail(" worker", served.error());
}

}  // namespace xpyd::server
