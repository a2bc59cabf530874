// Sender is the prefill side of an instance: it sends the KV of prompts to decode instances while the engine computes
// them. The sender's table in states.h decides what happens to an attempt, and the functions here carry out its
// actions. After each layer (layer_ended, which the engine calls inside a step) it reads grants and polls transfers.
// Everything else waits for the end of the step.
//
// Thread safety: the instance's thread.
#pragma once

#include <unordered_map>
#include <vector>

#include "batch/engine/engine.h"
#include "disagg/handover/attempts.h"
#include "disagg/handover/leases.h"
#include "disagg/handover/states.h"

namespace xpyd::disagg::handover {

class Sender final : public EngineHooks {
 public:
  Sender(InstanceParts& parts, Leases& leases, StreamKv stream) : parts_(parts), leases_(leases), stream_(stream) {}

  // Registers an attempt whose KV will go to `decode`. Requires: its sequence enters the engine next.
  void expect(AttemptId attempt, InstanceId decode);

  // Asks D for room before the engine has the sequence (reservation.h).
  void ask(const Sequence& sequence);
  // Returns whether D has granted room. Requires: has(attempt).
  bool granted(AttemptId attempt) const { return kWriting.has(outgoing_.at(attempt).state); }

  // EngineHooks, for sequences that leave.
  void prefill_started(const Sequence& sequence) override;
  bool layerwise() const override { return stream_ == StreamKv::layer; }
  void layer_ended() override;
  void kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_begin, int token_end) override;
  void prefill_done(std::vector<SequencePtr> choices) override;
  void prefill_cancelled(const Sequence& sequence) override { on(outgoing_.at(sequence.attempt), SenderEvent::ended); }

  // Messages from a peer that has no part in the attempt have no effect.
  void handle(InstanceId from, KvReserved message);
  void handle(InstanceId from, const KvTaken& message);
  void handle(InstanceId from, const ReservationCancelled& message);
  void renewed(InstanceId from, AttemptId attempt);
  void peer_gone(InstanceId peer);  // gives up what is shared with the peer

  // Handles finished transfers, silent peers and finished requests. Returns whether something moved.
  bool tick();
  // Adds the attempts here that peers hold, too.
  void add_shared(SharedAttempts& of_peer) const;
  // Ends the sequences that wait here. Peers get no message.
  void clear(FinishReason reason, const std::string& error);

  bool has(AttemptId attempt) const { return outgoing_.contains(attempt); }
  bool empty() const { return outgoing_.empty(); }
  int sending() const;  // computed prompts whose KV is not sent yet
  // Calls f(request, handle) for each computed prompt whose KV stays here until it is sent.
  template <class F>
  void each_holder(F&& f) const {
    for (const auto& [attempt, out] : outgoing_)
      if (out.kv != kNoKv) f(out.request, out.kv);
  }

 private:
  using State = SenderState;
  using Event = SenderEvent;
  using Action = SenderAction;
  static constexpr Any<State> kWriting = {State::writing, State::writing_short};
  static constexpr Any<State> kHolding = {State::waiting, State::offered};
  static constexpr Any<State> kOver = {State::withdrawing, State::withdrawing_told, State::closing,
                                       State::closing_told};
  // The peer knows the attempt and must renew it within a lease.
  static constexpr Any<State> kShared = kWriting | kHolding | Any{State::asked, State::prefill_sending};
  // These states end when no transfer is in flight any more.
  static constexpr Any<State> kQuiet = {State::prefill_sending, State::closing, State::closing_told,
                                        State::withdrawing_told};

  struct Flight {
    TransferId id;
    KvLease lease;  // keeps the source blocks while they are read
    double post_s;
    size_t bytes;
  };
  struct Outgoing {
    AttemptId attempt = 0;
    uint64_t request = 0;
    InstanceId peer = -1;
    State state = State::expected;
    double deadline_s = 0;          // Clock: then the peer counts as silent
    std::vector<Flight> in_flight;  // tick() reads the fields up to here of every prompt that waits
    double until_s = 0;             // Clock: deadline of the request
    int n_tokens = 0;               // tokens for which the peer was asked for room
    KvPlace destination;
    std::vector<int> sent;  // [n_layers] tokens already given to the transport
    int posts = 0;
    double first_post_s = 0, last_end_s = 0;  // Clock; 0: no transfer has succeeded
    int64_t bytes = 0;                        // given to the transport
    KvHandle kv = kNoKv;                      // once the prompt is computed
    std::vector<SequencePtr> choices;         // … until they are delivered
    RemoteKey registration;                   // pull: of the registration that the peer may read through
  };
  // The data of an event.
  struct With {
    std::string why;
    const Sequence* sequence = nullptr;  // started
    KvPlace* place = nullptr;            // reserved
  };

  void on(Outgoing& out, Event event, With with);
  void on(Outgoing& out, Event event) { on(out, event, With()); }
  Outgoing* find(InstanceId peer, AttemptId attempt);
  void send(Outgoing& out, KvHandle kv, int layer_begin, int layer_end, int token_end);
  void send_rest(Outgoing& out) { send(out, out.kv, 0, parts_.n_layers, out.choices[0]->given); }
  void ended(Outgoing& out, double post_s, size_t bytes);
  void offer(Outgoing& out);
  void deliver(Outgoing& out);
  bool poll(Outgoing& out);
  // A request that is cancelled or late need not wait for room at D.
  FinishReason over(const Outgoing& out) const { return out.choices[0]->over(parts_.clock.now()); }
  void end(Outgoing& out);
  void free(Outgoing& out);

  InstanceParts& parts_;
  Leases& leases_;
  const StreamKv stream_;
  std::unordered_map<AttemptId, Outgoing> outgoing_;
  TransferPlan plan_;
};

}  // namespace xpyd::disagg::handover
