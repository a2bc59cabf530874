// An instance in a process of its own: joins the conductor, speaks with its peers over channels of their own, and joins
// again (as a new instance, which goes on with the prefix cache of the one before) when the conductor has given it up,
// was restarted, or another one has taken its place.
//
// Threads: run() keeps connections, and renews leases, on the caller's thread; the instance has one, the channels one.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "disagg/instance/cluster.h"
#include "disagg/net/channel.h"
#include "disagg/processes/registry.h"

namespace xpyd::disagg {

struct WorkerOptions {
  ClusterOptions cluster;  // topology is not looked at
  Role role = Role::colocated;
  std::string join;  // the conductor's control address
  // Instead: which conductor holds the name, by the registry. It is asked each time, and while an instance serves. No
  // other one is joined, and one that loses the name to another is left.
  std::function<NamedConductor()> find_conductor;
  std::string listen = "127.0.0.1:0";  // for peers
  ClusterKey key;
  uint64_t fingerprint = 0;  // NodeIdentity
  double retry_s = 0.2;      // between attempts to reach the conductor, or a peer
  double give_up_s = 0;      // without a conductor for so long: run() ends; 0: never
};

// Who a worker says it is while it is no instance: on one host its process alone.
std::string process_name(int64_t pid);

class Worker final : public Post {
 public:
  Worker(WorkerOptions options, Clock& clock);
  ~Worker() override;

  // Serves until leave() has been granted, or stop(). An error: the conductor refused, or the
  // instance could not be made.
  Status run();
  void leave();  // drained first; any thread
  void stop();   // at once; any thread
  // The instance cannot go on: it ends, and joins again as another one. Nobody hears what it says from now on.
  void give_up(const std::string& why);  // any thread

  void send(InstanceId from, InstanceId to, Message message) override;

 private:
  struct Peer {
    InstanceInfo info;
    ChannelPtr channel;                // null: none yet
    std::vector<std::string> waiting;  // frames, type first, until it is there
    bool broken = false;               // it was there, and words were lost with it
    bool dialling = false;
    double again_s = 0;  // Clock: not dialled before
  };
  enum class Outcome { again, done };

  Result<Outcome> serve_once();
  Result<Outcome> serve_with(ControlLoop& loop);
  Result<std::optional<Welcome>> join(ControlLoop& loop, const NamedConductor& conductor);
  Result<BuiltInstance> build(const Welcome& as);
  bool tend(ControlLoop& loop, const Welcome& as, Instance& instance, const std::string& conductor);
  Outcome end(bool goes);
  void leave_memory(BuiltInstance built, double patience_s);
  ChannelEvents on_conductor(ChannelPtr channel);
  ChannelEvents on_peer(InstanceId peer, ChannelPtr channel);
  ChannelEvents on_dialled(InstanceId self, const std::string& members, ChannelPtr channel);
  void on_message(InstanceId from, Message message);
  ChannelEvents attach(InstanceId peer, ChannelPtr channel);
  void dial_missing(ControlLoop& loop);
  NodeIdentity identity(InstanceId id) const;

  WorkerOptions options_;
  Clock& clock_;
  InstanceMemory left_;  // by the last instance; run()'s

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool leaving_ = false, stopped_ = false, lost_ = false;
  bool leave_said_ = false;
  std::optional<Welcome> welcome_;
  std::optional<Retire> retire_;
  ChannelPtr conductor_;
  std::string members_of_;  // ids of that conductor's instances end so
  std::map<InstanceId, Peer> peers_;
  Instance* instance_ = nullptr;  // while it is there
  std::vector<Envelope> early_;   // until it is
};

}  // namespace xpyd::disagg
