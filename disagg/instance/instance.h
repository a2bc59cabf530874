// One instance: an engine, its KV memory, its transport, and both sides of the P/D state machine (drawn in
// disagg/handover/README.md). It knows peers and conductor by number and sends them messages through a MessageBus,
// whether they are threads or processes.
//
// Thread safety: any thread may call send(), poke(), stats() and renew_leases(). Everything else is for
// the instance's own thread, or, under a virtual clock, for the one thread that calls turn() of all instances.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "batch/engine/engine.h"
#include "disagg/handover/held_messages.h"
#include "disagg/handover/leases.h"
#include "disagg/handover/sender.h"
#include "disagg/instance/instance_options.h"
#include "disagg/instance/instance_status.h"
#include "disagg/instance/kv_exchange.h"
#include "disagg/instance/peer_links.h"
#include "disagg/instance/step_costs.h"

namespace xpyd::disagg {

class Instance final {
 public:
  // `memory` may outlive the instance (see build_instance()).
  Instance(InstanceOptions options, std::unique_ptr<Model> model, std::shared_ptr<KvMemory> memory,
           std::unique_ptr<KvTransport> transport, Clock& clock, MessageBus& bus);

  InstanceInfo info() const;
  void send(InstanceId from, Message message);  // puts it into the inbox; never blocks
  void poke() {                                 // wakes the instance's thread
    leases_.mailbox().poke();
    model_->interrupt();
  }
  // Tells peers and conductor that this instance lives and which attempts it holds (handover/leases.h). Requires: a
  // control thread calls it every eighth of a lease, unless leases are off.
  void renew_leases();

  // One iteration of the loop: messages, reservations, transfers, one engine step. Returns false if nothing moved.
  bool turn();
  // Calls turn() until `stop` is set, and sleeps when there is nothing to do.
  void run(const std::atomic<bool>& stop);
  // Returns whether no request is in progress here.
  bool idle() const { return engine_.idle() && kv_.empty(); }
  // Returns whether transfers must be polled, because no message announces their end.
  bool counts_posts() const { return kv_.counts(); }
  // Ends every sequence with `reason`. In an orderly shutdown the conductor gets these ends. Peers get no message.
  void shut_down(FinishReason reason, const std::string& error);

  const InstanceOptions& options() const { return options_; }
  // Checks the memory (`complete` as in KvMemory) and the engine's queues.
  void check_invariants(bool complete = true) const {
    memory_->check_invariants(complete);
    engine_.check_invariants();
  }
  const KvMemory& memory() const { return *memory_; }
  KvMemory& memory() { return *memory_; }
  // See InstanceStatus.
  InstanceStats stats() const { return status_.stats(); }
  const std::atomic<uint64_t>& published() const { return status_.published(); }

 private:
  void handle(InstanceId from, StartRequest message);
  void handle(InstanceId from, PrefillJob message);
  void handle(InstanceId from, PeerGone message);
  void handle(InstanceId, ClearPrefixCache) { memory_->clear_prefix_cache(); }
  // Other messages go to the parts that have a handle() for them.
  template <class M>
  void handle(InstanceId from, M message) {
    hand_to(from, std::move(message), peers_, kv_);
  }
  void begin(StartRequest message, KvHandle kv, int tokens);
  void compute(SequencePtr sequence, bool leaves, InstanceId decode);
  void watch();
  void log_step(const StepCosts::Took& took);

  InstanceOptions options_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<KvMemory> memory_;
  std::unique_ptr<KvTransport> transport_;
  HeldMessages bus_;
  InstanceParts parts_;
  handover::Leases leases_;
  handover::Sender sender_;
  Engine engine_;
  KvExchange kv_;
  PeerLinks peers_;
  StepCosts costs_;
  InstanceStatus status_;
  size_t n_waiting_ = 0;  // messages at the head of the inbox that wait for a connection
  int64_t logged_evictions_ = 0;
  ExpertLoad logged_experts_;
};

}  // namespace xpyd::disagg
