// The prefill side of an instance: prompts whose KV goes to a decode instance, as the engine tells of them. What
// becomes of one is the sender's table of states.h; here is what its actions do. A step's end of a layer is where a
// peer's grant is read and posts are looked after (layer_ended, called by the model); all else waits for the step's
// end.
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

  // The attempt will leave for `decode`; its sequence goes to the engine now.
  void expect(AttemptId attempt, InstanceId decode);

  // Asks for room before the engine has it (reservation.h).
  void ask(const Sequence& sequence);
  bool granted(AttemptId attempt) const { return kWriting.has(outgoing_.at(attempt).state); }

  // Of sequences that leave.
  void prefill_started(const Sequence& sequence) override;
  bool layerwise() const override { return stream_ == StreamKv::layer; }
  void layer_ended() override;
  void kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_begin, int token_end) override;
  void prefill_done(std::vector<SequencePtr> choices) override;
  void prefill_cancelled(const Sequence& sequence) override { on(outgoing_.at(sequence.attempt), SenderEvent::ended); }
  void prefill_broken(const Sequence& sequence) override;

  // Of a peer that has no part in the attempt they mean nothing.
  void handle(InstanceId from, KvReserved message);
  void handle(InstanceId from, const KvTaken& message);
  void handle(InstanceId from, const ReservationCancelled& message);
  void renewed(InstanceId from, AttemptId attempt);
  // Gives up what is shared with the peer. `why`: for the conductor; "" where it knows.
  void peer_gone(InstanceId peer, const std::string& why = "");

  // All that time brings: posts that are done, peers that are silent, requests that are over. True:
  // something moved.
  bool tick();
  // Attempts that stand here and belong to peers, too.
  void add_shared(SharedAttempts& of_peer) const;
  // Ends what waits here; nothing is told to peers.
  void clear(FinishReason reason, const std::string& error);

  bool has(AttemptId attempt) const { return outgoing_.contains(attempt); }
  bool empty() const { return outgoing_.empty(); }
  int sending() const;
  // f(request, handle) of each prompt that is done, and whose KV stands here until it is sent.
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
  // The peer knows of it, and has said so within a lease.
  static constexpr Any<State> kShared = kWriting | kHolding | Any{State::asked, State::prefill_sending, State::lent};
  // They end when nothing is under way any more.
  static constexpr Any<State> kQuiet = {State::prefill_sending, State::closing, State::closing_told,
                                        State::withdrawing_told};

  struct Flight {
    TransferId id;
    KvLease lease;  // the source blocks stay while they are read
    double post_s;
    size_t bytes;
  };
  struct Outgoing {
    AttemptId attempt = 0;
    uint64_t request = 0;
    InstanceId peer = -1;
    State state = State::expected;
    int n_tokens = 0;       // for which the peer was asked for room
    double until_s = 0;     // of the request
    double deadline_s = 0;  // without a word of the peer
    KvPlace destination;
    std::vector<int> sent;  // [n_layers]: tokens already posted
    std::vector<Flight> in_flight;
    int posts = 0;
    double first_post_s = 0, last_end_s = 0;  // Clock; 0: none has ended well
    int64_t bytes = 0;                        // posted
    KvHandle kv = kNoKv;                      // once the prompt is done
    std::vector<SequencePtr> choices;         // … until they are delivered
    RemoteKey registration;                   // pull: the peer may read
    KvHandover given;                         // lent
  };
  // What an event brings.
  struct With {
    AttemptFailure reason = AttemptFailure::given_up;
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
  // Who has gone away, or is late, need not wait for room on the other side.
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
