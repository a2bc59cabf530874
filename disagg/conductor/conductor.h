// The conductor knows the instances, places each request on them, and places it again when one of them fails. It
// exchanges messages only. Its callers own the threads, processes and network.
//
// A request's choices are served by attempts. An attempt fails when an instance is gone or gives it up. It is then
// placed anew, with the prompt and the tokens that the client already has. Tokens of abandoned attempts are dropped, so
// the client's stream has no token twice and none missing.
//
// The class holds the one lock and routes calls between its parts. Each part has its own header:
//   ClusterState   the instances               RequestTable   choices, their tokens, their ends
//   Planner        placement, order, refusals  AttemptTable   attempts and their charges, the global prefill queue
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
#include "disagg/conductor/request_table.h"
#include "disagg/messages.h"
#include "disagg/service.h"

namespace xpyd::disagg {

class Conductor final : public Service {
 public:
  Conductor(ConductorOptions options, Clock& clock, MessageBus& bus);

  InstanceId new_id();  // the number of the next instance; never given twice
  // Adds an instance and announces it to all others. Waiting choices are placed at once.
  void joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe);
  void left(InstanceId id, const std::string& why);  // removes an instance and places its attempts anew
  void drain(InstanceId id, bool on);                // a draining instance gets nothing new
  // Handles a message of an instance. Messages of unknown instances and of abandoned attempts are ignored.
  void receive(InstanceId from, Message&& message);
  void tick();  // at least every quarter of a lease: removes silent instances, retries

  // See Service. Errors: invalid_argument for a request that exceeds the context or an instance; unavailable
  // if no instance is there, or the conductor drains. A refusal by --admission is an event, not an error.
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override;
  void abort(uint64_t request_id) override;
  ServiceStats stats() const override;
  ServicePicture picture() const override;
  std::string trouble() const override;

  void drain();                          // the conductor refuses new requests from now on
  bool wait_idle(double seconds);        // true: nothing is in flight any more
  bool idle(InstanceId id) const;        // true: nothing is placed there
  void end_all(const std::string& why);  // ends every open choice with `abort`

  std::vector<InstanceInfo> members() const;
  // Calls f(cluster) under the lock.
  template <class F>
  auto look(F f) const {
    std::lock_guard lock(mutex_);
    return f(cluster_);
  }

 private:
  using Entry = RequestTable::Entry;
  using Choice = RequestTable::Choice;
  using Out = SinkEvents;
  // Choices that wait for an instance.
  struct Parked {
    uint64_t request;
    int first, count;
    double since_s;
    double not_before_s;  // backoff: grows with the number of failures
  };

  void on(InstanceId from, TokenOf&& message, Out& out);
  void on(InstanceId from, AttemptProgress message, Out& out);
  void on(InstanceId from, AttemptFailed message, Out& out);
  void on(InstanceId from, PrefillJob message, Out& out);
  void on(InstanceId from, CacheReport message, Out&) { cluster_.board().heard(cluster_.at(from), message); }
  template <class M>
  void on(InstanceId, M, Out&) {}  // other messages go between instances; a Report went to its probe

  Status take_in(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink, Out& out);
  bool start(uint64_t id, int first, int count, Out& out);
  bool refused_late(AttemptId number, Out& out);
  void copy_prompt(AttemptId number, const Attempt& attempt);
  void fail(AttemptId number, const std::string& why, Out& out);
  void remove(InstanceId id, const std::string& why, Out& out);
  void call_off(AttemptId number, const Attempt& attempt);
  void park(const Attempt& attempt, bool begun);
  void retry_parked(Out& out);
  void deliver();
  template <class F>
  void act(F f);

  mutable std::mutex mutex_;  // guards what follows, except in_delivery_
  std::condition_variable idle_;
  ConductorContext context_;
  ClusterState cluster_;
  RequestTable requests_;
  AttemptTable attempts_;
  Planner planner_;
  std::vector<Parked> parked_;
  bool draining_ = false;
  Out outbox_;  // events that no thread delivers yet
  bool delivering_ = false;
  Out in_delivery_;   // of the thread that delivers
  int refusing_ = 0;  // calls of submit() that are delivering a refusal
};

}  // namespace xpyd::disagg
