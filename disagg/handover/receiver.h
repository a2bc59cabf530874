// Receiver is the decode side of an instance: it grants room to prefill instances and takes in the KV that arrives. The
// receiver's table in states.h decides what happens to an attempt, and the functions here carry out its actions. Room
// is granted only when it is free, held while a peer may write there, and given to others only when no peer can any
// more.
//
// Thread safety: the instance's thread.
#pragma once

#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "batch/engine/engine.h"
#include "disagg/handover/attempts.h"
#include "disagg/handover/kv_room.h"
#include "disagg/handover/leases.h"
#include "disagg/handover/states.h"

namespace xpyd::disagg::handover {

// Cumulative counters.
struct ReceiverStats {
  int64_t refused_kv = 0;  // deliveries with missing or late KV; computed again here
};

class Receiver {
 public:
  Receiver(InstanceParts& parts, Attempts& attempts, const KvRoom& room, Engine& engine)
      : parts_(parts), attempts_(attempts), room_(room), engine_(engine) {}

  // decode_first: this instance has the request, and any prefill instance will compute its KV.
  void start(StartRequest message);
  void handle(InstanceId from, ReserveKv message);
  void handle(InstanceId from, KvDelivered message);
  void handle(InstanceId from, KvOffered message);
  void handle(InstanceId from, const ReservationCancelled& message);
  void renewed(InstanceId from, AttemptId attempt);
  void peer_gone(InstanceId peer);  // gives up what is shared with the peer

  // Handles silent peers, finished requests, free room and KV that has arrived. Returns whether something moved.
  bool tick();
  // Adds the attempts here that peers hold, too.
  void add_shared(SharedAttempts& of_peer) const;
  // Drops all attempts. It ends the sequences that wait here and sends peers no message.
  void clear(FinishReason reason, const std::string& error);

  // Returns whether transfers are still arriving. Only polling the transport tells when they have arrived.
  bool counts() const { return !finished_prefills_.empty(); }
  bool empty() const { return incoming_.empty() && quarantine_.empty(); }
  // Returns the number of attempts in any state.
  int expected() const { return int(incoming_.size()); }
  const ReceiverStats& stats() const { return stats_; }
  // Calls f(request, handle) for each place into which KV arrives.
  template <class F>
  void each_holder(F&& f) const {
    for (const auto& [attempt, in] : incoming_)
      if (in.place.kv != kNoKv) f(in.request->id, in.place.kv);
  }

 private:
  using State = ReceiverState;
  using Event = ReceiverEvent;
  using Action = ReceiverAction;
  static constexpr Any<State> kUngranted = {State::remote_prefilling, State::loading};
  // These attempts end if the peer is silent for a lease, or if the request is over. A delivered attempt continues:
  // with its KV if all of it arrives, else without.
  static constexpr Any<State> kLeased = kUngranted | Any{State::granted, State::reading};
  static constexpr Any<State> kUndelivered = kUngranted | Any{State::unclaimed, State::granted};
  static constexpr Any<State> kCounting = {State::finished_prefills, State::closing};
  static constexpr Any<State> kHere = {State::finished_transfers, State::incomplete};
  static constexpr Any<State> kFinished = kCounting | kHere | State::reading;

  struct Incoming {
    AttemptId attempt = 0;
    InstanceId from = -1;  // decode_first: -1 until a prefill instance takes it
    State state = State::remote_prefilling;
    std::shared_ptr<const Request> request;
    std::vector<int32_t> tokens;  // whose KV arrives: the prompt, and output of earlier attempts
    std::vector<ChoiceState> choices;
    SequencePtr sequence;  // decode_first
    KvPlace source;        // pull
    Place place;
    double read_s = 0;  // pull: Clock, start of the read
    size_t read_bytes = 0;
    int posts = 0;  // transfers that must arrive
    std::optional<KvHandover> handover;
    double deadline_s = 0;  // Clock: then the peer counts as silent
  };
  // The data of an event.
  struct With {
    std::string why;
    InstanceId from = -1;              // claimed
    KvDelivered* delivered = nullptr;  // delivered
  };

  void on(Incoming& in, Event event, With with);
  void on(Incoming& in, Event event) { on(in, event, With()); }
  Incoming* find(InstanceId from, AttemptId attempt);
  bool is_welcome(InstanceId from, AttemptId attempt, DisaggOrder order);
  void expect(Incoming in);
  bool tidy();

  bool request_over(const Incoming& in) const;
  bool is_late(const Incoming& in) const;
  void accept(Incoming& in, KvDelivered& delivered);
  void end(Incoming& in);
  // Room, and the KV that arrives there. In decode_first the last prompt token is computed here, and the first output
  // token is sampled here.
  int n_computed(const Incoming& in) const { return int(in.tokens.size()) - int(samples_first()); }
  bool samples_first() const { return parts_.order == DisaggOrder::decode_first; }
  int granted() const;
  bool grant(Incoming& in);
  void announce(Incoming& in);
  void read(Incoming& in);
  void look(Incoming& in);
  bool all_arrived(const Incoming& in) const;
  void adopt(Incoming& in, bool whole);
  void give_back(std::optional<KvHandover>& handover);
  bool close(Place& place);
  void give_up(Place& place);
  bool sweep();

  InstanceParts& parts_;
  Attempts& attempts_;
  const KvRoom& room_;
  Engine& engine_;
  std::unordered_map<AttemptId, Incoming> incoming_;
  std::deque<AttemptId> remote_prefilling_;   // waiting for room, first come first
  std::vector<AttemptId> finished_prefills_;  // delivered, or being read
  int gone_ = 0;                              // attempts of incoming_ in state gone, until the next tidy()
  std::vector<Place> quarantine_;             // given up, and a transfer may still be inside
  TransferPlan plan_;
  ReceiverStats stats_;
};

}  // namespace xpyd::disagg::handover
