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
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator/prefix_log.h"
#include "batch/engine/engine.h"
#include "disagg/handover/attempts.h"
#include "disagg/handover/held_post.h"
#include "disagg/handover/leases.h"
#include "disagg/handover/receiver.h"
#include "disagg/handover/reservation.h"
#include "disagg/handover/sender.h"
#include "disagg/pool/fetcher.h"
#include "disagg/pool/lender.h"

namespace xpyd::disagg {

class EventLog;

struct InstanceOptions {
  InstanceId id = 0;
  std::string name;
  Role role = Role::colocated;
  StreamKv stream_kv = StreamKv::layer;
  bool escrow = false;  // prompts that leave begin when all that they need is held (handover/reservation.h)
  EngineOptions engine;
  StepCost cost;            // before the first step
  bool cost_known = false;  // steps take just that (a simulation's)
  double lease_s = 0;       // see InstanceParts; also: reports and renewals go out every quarter of it
  bool checksum = false;
  bool post_by_stage = false;            // InstanceParts
  std::shared_ptr<PrefixLog> cache_log;  // of its memory, for CacheReports; null: not wanted
  double report_every_s = 0.01;          // … at most
  handover::Visits* visits = nullptr;    // of a test
  std::shared_ptr<EventLog> log;         // of its plans, steps and transfers; null: none
  double bytes_scale = 1;                // of what crosses (a simulation's KV is small)
  double peak_tflops = 0;                // 10^12 FLOP/s that its threads can do; 0: not known
};

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
  bool idle() const {
    return engine_.idle() && reservations_.size() == 0 && sender_.empty() && receiver_.empty() && fetcher_.empty() &&
           lender_.empty();
  }
  // It has to look at what arrives, for which there is no mail.
  bool counts_posts() const { return receiver_.counts() || fetcher_.counts() || lender_.counts(); }
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
  InstanceStats stats() const;
  // Where its blocks are; null: not known yet. It is drawn between two steps, for the next seconds every 0.1 s at most,
  // and in a fiftieth of the time. Where nobody asks, nothing is.
  std::shared_ptr<const BlockMap> block_map() const;
  const std::atomic<uint64_t>& published() const { return published_count_; }  // times that they have changed

 private:
  void handle(InstanceId from, StartRequest message);
  void handle(InstanceId from, ClearPrefixCache) { (void)from, memory_->clear_prefix_cache(); }
  void handle(InstanceId from, AbortAttempt message) { (void)from, attempts_.abort(message.attempt); }
  void handle(InstanceId from, PeerJoined message);
  void handle(InstanceId from, PeerGone message);
  void handle(InstanceId from, PeerBroken message);
  void handle(InstanceId from, PrefillJob message);
  void handle(InstanceId from, ReserveKv message) { receiver_.handle(from, std::move(message)); }
  void handle(InstanceId from, KvReserved message) { sender_.handle(from, std::move(message)); }
  void handle(InstanceId from, KvDelivered message) { receiver_.handle(from, std::move(message)); }
  void handle(InstanceId from, KvOffered message) { receiver_.handle(from, std::move(message)); }
  void handle(InstanceId from, KvTaken message) { sender_.handle(from, message); }
  void handle(InstanceId from, FetchKv message) {
    computes_ = false;  // there is no choice between loading and computing
    lender_.handle(from, std::move(message));
    computes_ = true;
  }
  void handle(InstanceId from, KvLent message) { fetcher_.handle(from, std::move(message)); }
  void handle(InstanceId from, FetchOver message) { lender_.handle(from, message); }
  void handle(InstanceId from, ReservationCancelled message);
  void handle(InstanceId from, KvRenewed message);
  // The conductor's alone.
  template <class M>
  void handle(InstanceId, M) {}
  void begin(StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival);
  void compute(SequencePtr sequence, DisaggOrder order, InstanceId decode);
  bool connect_wires();  // true: a wire is connected, or cannot be
  bool waits_for_wire(const Envelope& envelope) const;
  void update_leases();
  void report_cache();
  void fit_cost();
  void watch();
  void log_step(const StepShape& step, double seconds);
  std::string name_of(InstanceId id) const;
  void charge_transfers();
  void publish();
  void draw_map();

  InstanceOptions options_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<KvMemory> memory_;
  std::unique_ptr<KvTransport> transport_;
  Clock& clock_;
  HeldPost post_;
  InstanceParts parts_;
  Attempts attempts_;
  handover::Leases leases_;
  handover::Sender sender_;
  Engine engine_;
  handover::Receiver receiver_;
  handover::Reservations reservations_;
  pool::Fetcher fetcher_;
  pool::Lender lender_;
  bool computes_ = true;  // what it reserves now, where that is not found

  // A peer that the wire is not connected to yet.
  struct PendingPeer {
    InstanceInfo info;
    bool calling = true;  // for the first time; false: it could not be reached
    double since_s = 0;   // Clock: this try
    double again_s = 0;   // Clock: not asked before
  };
  std::map<InstanceId, PendingPeer> pending_;
  std::map<InstanceId, std::string> peer_names_;
  bool idle_ = true;       // at the end of the last turn
  size_t n_waiting_ = 0;   // for a wire: the first ones of the inbox
  double reported_s_ = 0;  // Clock: the last CacheReport

  mutable std::mutex stats_mutex_;
  InstanceStats published_;
  std::shared_ptr<const BlockMap> map_;
  std::atomic<uint64_t> published_count_{0};
  mutable std::atomic<double> watched_until_s_{0};  // Clock; 0: nobody looks at the map
  double next_map_s_ = 0;                           // Clock: not before
  EngineStats counted_;                             // that cost_ has seen
  double fitted_s_ = 0;                             // when it did, if the last turn had a step
  bool back_to_back_ = false;                       // the last turn moved, and nobody napped since
  int64_t logged_evictions_ = 0;
  double transfer_block_s_ = 0, charged_s_ = 0;  // Spent::transfer_gb_s, until then (Clock)
  size_t moving_blocks_ = 0;                     // … and since
  StepCost cost_;
};

}  // namespace xpyd::disagg
