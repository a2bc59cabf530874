// A cluster whose instances are processes: the conductor, and the channels to its workers (worker.h). Messages between
// two workers pass through it. Workers join, drain, change their role, leave and die while requests run.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "disagg/conductor/conductor.h"
#include "disagg/net/channel.h"
#include "disagg/processes/codec.h"

namespace xpyd::disagg {

struct ProcessClusterOptions {
  ConductorOptions conductor;
  std::string listen = "127.0.0.1:0";
  ClusterKey key;
  uint64_t fingerprint = 0;  // see NodeIdentity; workers with another one are refused
  bool stands_by = false;    // no worker is accepted before take_workers(true)
};

class ProcessCluster final : public Runtime, public MessageBus {
 public:
  // Listens for workers. The error says why it cannot.
  static Result<std::unique_ptr<ProcessCluster>> create(ProcessClusterOptions options, Clock& clock);
  ~ProcessCluster() override;

  const std::string& address() const { return address_; }  // where workers join
  const std::string& id() const { return id_; }            // "conductor.1f…", drawn at random
  void take_workers(bool yes) { takes_workers_ = yes; }    // accepts or refuses new workers
  bool wait_members(int n, double seconds);                // true: n instances serve
  std::string process_of(const std::string& name) const;   // of an instance, see process_name(); "": there is none
  // See Runtime: the instance drains, then ends or joins again as `role`.
  Status retire(const std::string& name, std::optional<Role> role) override;
  Status start() override { return ok(); }  // workers join by themselves
  void clear_prefix_caches() override;
  void drain() override { conductor_.drain(); }
  bool wait_idle(double seconds) override { return conductor_.wait_idle(seconds); }
  void stop() override;  // also closes every channel

  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override {
    return conductor_.submit(std::move(request), std::move(sink));
  }
  void abort(uint64_t request_id) override { conductor_.abort(request_id); }
  ServiceStats stats() const override { return conductor_.stats(); }
  ServicePicture picture() const override { return conductor_.picture(); }
  std::string trouble() const override { return conductor_.trouble(); }
  const Conductor& conductor() const { return conductor_; }

  void send(InstanceId from, InstanceId to, Message message) override;

 private:
  class Probe;
  struct Worker {
    ChannelPtr channel;
    std::string name;
    Role role = Role::colocated;
    std::shared_ptr<Probe> probe;
    bool joined = false, retiring = false;
    std::optional<Role> next_role;
  };

  ProcessCluster(ProcessClusterOptions options, Clock& clock);
  ChannelEvents on_open(ChannelPtr channel);
  void on_message(InstanceId id, Message message);
  ChannelPtr channel_of(InstanceId id) const;  // null: there is none
  void on_closed(InstanceId id, const std::string& why);
  std::string free_name(Role role) const;  // requires the mutex
  void keep();                             // thread: leases and retirements

  const ProcessClusterOptions options_;
  Clock& clock_;
  const std::string id_;
  std::atomic<bool> takes_workers_;
  std::string address_;
  Conductor conductor_;

  mutable std::mutex mutex_;  // guards what follows; not held during calls of the conductor
  std::condition_variable changed_;
  bool stop_ = false;
  std::map<InstanceId, Worker> workers_;
  std::thread keeper_;
  std::unique_ptr<ControlLoop> loop_;
};

}  // namespace xpyd::disagg
