// The conductor: which instances there are, where each request is served, and what becomes of it when one of them
// fails. It sees messages alone; threads, processes and the network are its callers'.
//
// A request's choices are served by attempts. An attempt that fails (an instance is gone, or has given it up) is placed
// anew, from the prompt and the tokens that the client has; tokens of attempts that were given up are dropped, so the
// client's stream goes on without a token twice or missing.
//
// The class is the one lock and the ways from one part to another; each part has its own header:
//   ClusterState   which instances are there     RequestTable   choices, their tokens, their ends
//   AttemptTable   who computes what, charges    PrefillQueue   jobs that any prefill instance may take
//   Planner        where an attempt goes, and what is refused
//
// Thread safety: any thread.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "disagg/conductor/attempt_table.h"
#include "disagg/conductor/cluster_state.h"
#include "disagg/conductor/conductor_options.h"
#include "disagg/conductor/planner.h"
#include "disagg/conductor/prefill_queue.h"
#include "disagg/conductor/request_table.h"
#include "disagg/messages.h"
#include "disagg/service.h"

namespace xpyd::disagg {

class Conductor final : public Service {
 public:
  Conductor(ConductorOptions options, Clock& clock, Post& post);

  InstanceId new_id();
  void joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe);
  // `refused`: it is there, and not listened to any more.
  void left(InstanceId id, const std::string& why, AttemptFailure reason = AttemptFailure::instance_gone);
  void drain(InstanceId id, bool on);  // it gets nothing new
  void receive(InstanceId from, Message message);
  void tick();  // every so often: who is silent, who has waited too long

  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override;
  void abort(uint64_t request_id) override;
  ServiceStats stats() const override;
  ServicePicture picture() const override;
  std::string trouble() const override;

  void drain();                    // refuses new requests from now on
  bool wait_idle(double seconds);  // true: nothing in flight any more
  bool idle(InstanceId id) const;  // nothing is placed there
  void end_all(const std::string& why);

  // Order-independent sum over the choices that ended by stop or length of their logits hash.
  uint64_t logits_hash() const;
  PlacedLoad load(InstanceId id) const;
  size_t known_blocks(InstanceId id) const;  // in its prefix cache, by its reports
  ConductorStats totals() const;
  std::vector<InstanceInfo> members() const;
  void set_shared_pool(bool shared) { shared_pool_ = shared; }

 private:
  using Entry = RequestTable::Entry;
  using Choice = RequestTable::Choice;
  using Out = SinkEvents;  // to be passed on once the lock is free
  // Choices that wait for an instance.
  struct Parked {
    uint64_t request;
    int first, count;
    double since_s;
    double not_before_s;  // what fails again and again waits longer and longer
  };

  void on(InstanceId from, TokenOf message, Out& out);
  void on(InstanceId from, AttemptProgress message, Out& out);
  void on(InstanceId from, AttemptFailed message, Out& out);
  void on(InstanceId from, PrefillJob message, Out& out);
  void on(InstanceId from, CacheReport message, Out&) { cluster_.board().heard(cluster_.at(from), message); }
  template <class M>
  void on(InstanceId, M, Out&) {}  // between instances; of a Report, its probe has read it

  Status take_in(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink, Out& out);
  bool start(uint64_t id, int first, int count, Out& out);
  void tell(AttemptPlan& plan, AttemptId number);
  bool refused_late(AttemptId number, Out& out);
  void fail(AttemptId number, AttemptFailure reason, const std::string& why, Out& out);
  void remove(InstanceId id, AttemptFailure reason, const std::string& why, Out& out);
  void forget(AttemptId number);
  void call_off(AttemptId number, const Attempt& attempt);
  void park(const Attempt& attempt, bool begun);
  void retry_parked(Out& out);
  void pass_on(Out& out);
  // f(out) under the lock.
  template <class F>
  void act(F f) {
    Out out;
    {
      std::lock_guard lock(mutex_);
      f(out);
      passing_ += int64_t(out.size());
    }
    pass_on(out);
  }

  bool shared_pool_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable idle_;
  ConductorContext context_;
  ClusterState cluster_;
  RequestTable requests_;
  AttemptTable attempts_;
  PrefillQueue jobs_;
  Planner planner_;
  std::vector<Parked> parked_;
  bool draining_ = false;
  int64_t passing_ = 0;  // events on their way to their sinks
};

}  // namespace xpyd::disagg
