// One instance: an engine, its KV memory, its wire, and both sides of the P/D state machine
// (disagg/README.md draws it). It knows its peers and the conductor by number alone, and tells them
// messages; whether they are threads of this process or run elsewhere is the Post's affair.
//
// Thread safety: send(), poke() and stats() from any thread; everything else from the instance's
// own thread (or, under a virtual clock, from the one thread that turns all instances).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "batch/engine/engine.h"
#include "disagg/handover/held_post.h"
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
  // The memory may outlive it: build_instance().
  Instance(InstanceOptions options, std::unique_ptr<Model> model, std::shared_ptr<KvMemory> memory,
           std::unique_ptr<KvTransport> transport, Clock& clock, Post& post);

  InstanceInfo info() const;
  void send(InstanceId from, Message message);
  void poke() {
    leases_.mail().poke();
    model_->interrupt();
  }
  // The thread of control, every eighth of a lease: says that this instance lives, and what stands
  // at it (handover/leases.h). Where leases are 0 nobody needs to.
  void renew_leases();

  // One turn of the loop: messages, promises, transfers, one engine step. False: nothing moved.
  bool turn();
  // Turns until `stop` is set; sleeps when there is nothing to do.
  void run(const std::atomic<bool>& stop);
  // Nothing is in progress here.
  bool idle() const { return engine_.idle() && kv_.empty(); }
  // It has to look at what arrives, for which there is no mail.
  bool counts_posts() const { return kv_.counts(); }
  // Whatever is inside ends with `reason`. For an end in order the conductor hears of it; what the
  // others know of it they find out by themselves.
  void shut_down(FinishReason reason, const std::string& error);

  const InstanceOptions& options() const { return options_; }
  // Of its memory (`complete`: as KvMemory's), and of who waits in its engine.
  void check_invariants(bool complete = true) const {
    memory_->check_invariants(complete);
    engine_.check_invariants();
  }
  const KvMemory& memory() const { return *memory_; }
  KvMemory& memory() { return *memory_; }
  // InstanceStatus.
  InstanceStats stats() const { return status_.stats(); }
  std::shared_ptr<const BlockMap> block_map() const { return status_.block_map(); }
  const std::atomic<uint64_t>& published() const { return status_.published(); }

 private:
  void handle(InstanceId from, StartRequest message);
  void handle(InstanceId from, PrefillJob message);
  void handle(InstanceId from, PeerGone message);
  void handle(InstanceId from, PeerBroken message);
  void handle(InstanceId, ClearPrefixCache) { memory_->clear_prefix_cache(); }
  // Of every other message: the parts that have a handle() for it; of the conductor's there is none.
  template <class M>
  void handle(InstanceId from, M message) {
    hand_to(from, std::move(message), peers_, kv_);
  }
  void begin(StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival);
  void compute(SequencePtr sequence, DisaggOrder order, InstanceId decode);
  void watch();
  void log_step(const StepCosts::Took& took);

  InstanceOptions options_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<KvMemory> memory_;
  std::unique_ptr<KvTransport> transport_;
  HeldPost post_;
  InstanceParts parts_;
  handover::Leases leases_;
  handover::Sender sender_;
  Engine engine_;
  KvExchange kv_;
  PeerLinks peers_;
  StepCosts costs_;
  InstanceStatus status_;
  size_t n_waiting_ = 0;  // for a wire: the first ones of the inbox
  int64_t logged_evictions_ = 0;
};

}  // namespace xpyd::disagg
