// The decode side of an instance: promises of room to prefill instances, and the KV that comes. What becomes of an
// attempt is the receiver's table of states.h; here is what its actions do. Room is promised only if it is there now,
// held while a peer may write there, and given to others only when nobody can any more.
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

// Cumulative.
struct ReceiverStats {
  int64_t refused_kv = 0;  // deliveries whose KV was short, late or changed: computed again here
  int64_t expired = 0;     // promises given up because the peer was silent
};

class Receiver {
 public:
  Receiver(InstanceParts& parts, Attempts& attempts, const KvRoom& room, Engine& engine)
      : parts_(parts), attempts_(attempts), room_(room), engine_(engine) {}

  // decode_first: this instance has the request; any prefill instance will compute its KV.
  void start(StartRequest message);
  void handle(InstanceId from, ReserveKv message);
  void handle(InstanceId from, KvDelivered message);
  void handle(InstanceId from, KvOffered message);
  void handle(InstanceId from, const ReservationCancelled& message);
  void renewed(InstanceId from, AttemptId attempt);
  // Gives up what is shared with the peer. `why`: for the conductor; "" where it knows.
  void peer_gone(InstanceId peer, const std::string& why = "");

  // All that time brings: peers that are silent, requests that are over, room, KV that is here. True:
  // something moved.
  bool tick();
  // Attempts that stand here and belong to peers, too.
  void add_shared(SharedAttempts& of_peer) const;
  // Nothing is told to anybody but the ends of sequences that wait here.
  void clear(FinishReason reason, const std::string& error);

  // Posts of what was delivered are on their way: nobody but the wire tells when they have arrived.
  bool counts() const { return !finished_prefills_.empty(); }
  bool has(AttemptId attempt) const { return incoming_.contains(attempt); }
  bool empty() const { return incoming_.empty() && quarantine_.empty(); }
  int expected() const { return int(incoming_.size()); }
  const ReceiverStats& stats() const { return stats_; }
  // f(request, handle) of each place that KV comes to.
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
  // These end without a word of the peer for a lease, or when the request is over; what is delivered
  // goes on: with the KV, where all of it arrives, or without.
  static constexpr Any<State> kLeased = kUngranted | Any{State::granted, State::reading};
  static constexpr Any<State> kUndelivered = kUngranted | Any{State::unclaimed, State::granted};
  static constexpr Any<State> kCounting = {State::finished_prefills, State::closing};
  static constexpr Any<State> kHere = {State::finished_transfers, State::incomplete};
  static constexpr Any<State> kFinished = kCounting | kHere | State::reading;

  struct Incoming {
    AttemptId attempt = 0;
    InstanceId from = -1;  // decode_first: -1 until a prefill instance has taken it
    State state = State::remote_prefilling;
    std::shared_ptr<const Request> request;
    std::vector<int32_t> tokens;  // whose KV comes: prompt, and output of an earlier attempt
    std::vector<ChoiceState> choices;
    SequencePtr sequence;  // decode_first
    KvPlace source;        // pull
    Place place;
    double read_s = 0;  // pull: its post
    size_t read_bytes = 0;
    int posts = 0;  // that are to be counted in the window
    std::vector<uint64_t> checksums;
    std::optional<KvHandover> handover;
    double deadline_s = 0;  // without a word of the peer
  };
  // What an event brings.
  struct With {
    AttemptFailure reason = AttemptFailure::given_up;
    std::string why;
    InstanceId from = -1;              // claimed, delivered
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
  bool fits(const Incoming& in, const std::vector<ChoiceState>& choices) const;
  void accept(Incoming& in, KvDelivered& delivered);
  void end(Incoming& in);
  // Room, and the KV that comes there (receiver_kv.cc).
  // decode_first: the last token is computed here, and the first one sampled.
  int n_computed(const Incoming& in) const { return int(in.tokens.size()) - int(samples_first()); }
  bool samples_first() const { return parts_.remote == DisaggOrder::decode_first; }
  int promised() const;
  bool grant(Incoming& in);
  void promise(Incoming& in);
  void read(Incoming& in);
  void look(Incoming& in);
  bool all_arrived(const Incoming& in) const;
  bool is_whole(const Incoming& in) const;
  void adopt(Incoming& in, bool whole);
  void give_back(InstanceId from, AttemptId attempt, std::optional<KvHandover>& handover);
  bool close(Place& place);
  void give_up(Place& place);
  bool sweep();

  InstanceParts& parts_;
  Attempts& attempts_;
  const KvRoom& room_;
  Engine& engine_;
  std::unordered_map<AttemptId, Incoming> incoming_;
  std::deque<AttemptId> remote_prefilling_;   // want room, in turn
  std::vector<AttemptId> finished_prefills_;  // delivered, or being read
  int gone_ = 0;                              // of incoming_, until the next tidy()
  std::vector<Place> quarantine_;             // not wanted any more, and somebody may be inside
  TransferPlan plan_;
  ReceiverStats stats_;
};

}  // namespace xpyd::disagg::handover
