// A worker: an instance in a process of its own. It joins the conductor, and has one channel, to it. It joins again, as
// a new instance with the old prefix cache, when the conductor has removed it, has restarted, or was replaced by another.
//
// Threads: run() keeps leases on the caller's thread. The instance and the channel have a thread each.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "disagg/instance/cluster.h"
#include "disagg/net/channel.h"
#include "disagg/processes/registry.h"

namespace xpyd::disagg {

struct WorkerOptions {
  ClusterOptions cluster;  // its topology is ignored
  Role role = Role::colocated;
  std::string join;  // control address of the conductor
  // Alternative to `join`: returns the conductor that holds the name in the registry. It is called before each join and
  // while the instance serves. The worker joins no other conductor, and leaves one that has lost the name.
  std::function<NamedConductor()> find_conductor;
  ClusterKey key;
  uint64_t fingerprint = 0;  // see NodeIdentity
  double retry_s = 0.2;      // between attempts to reach the conductor
  double give_up_s = 0;      // run() ends after this long without a conductor; 0: never
  // A call that never returns, as that of a dead device, ends only with its process. An instance that is to end and
  // whose turn takes longer than `hung_s` therefore calls hung(), which ends the process.
  double hung_s = kLongestTurnSeconds;
  std::function<void()> hung = [] { std::_Exit(1); };
};

// Returns the id of a worker's process, which it uses before it is an instance. It is the pid, and a hash of the host's
// start and of the pid namespace, which other hosts and containers do not share.
std::string process_name(int64_t pid);

class Worker final : public MessageBus {
 public:
  Worker(WorkerOptions options, Clock& clock);
  ~Worker() override;

  // Serves until leave() was granted or stop() was called. Returns an error if the conductor refused the worker or the
  // instance could not be made.
  Status run();
  void leave();  // after a drain; any thread
  void stop();   // immediately; any thread
  // The instance cannot go on. It ends, its later messages are dropped, and the worker joins as a new instance.
  void give_up(const std::string& why);  // any thread

  void send(InstanceId from, InstanceId to, Message message) override;

 private:
  enum class Outcome { again, done };

  Result<Outcome> serve_once();
  Result<Outcome> serve_with(ControlLoop& loop);
  Result<std::optional<Welcome>> join(ControlLoop& loop, const NamedConductor& conductor);
  Result<BuiltInstance> build(const Welcome& as);
  bool tend(const Welcome& as, Instance& instance, const std::string& conductor);
  Outcome end(bool goes);
  void leave_memory(BuiltInstance built, double patience_s);
  ChannelEvents on_conductor(ChannelPtr channel);
  void on_message(Envelope envelope);

  WorkerOptions options_;
  Clock& clock_;
  InstanceMemory left_;  // memory of the last instance; for run() only

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool leaving_ = false, stopped_ = false, lost_ = false;
  bool leave_said_ = false;
  std::optional<Welcome> welcome_;
  std::optional<Retire> retire_;
  ChannelPtr conductor_;
  Instance* instance_ = nullptr;  // null: none
  std::vector<Envelope> early_;   // messages before it existed
};

}  // namespace xpyd::disagg
