// The prefill side of an instance: prompts whose KV goes to a decode instance (disagg/README.md
// draws the state machine).
//
// Thread safety: the instance's thread.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "disagg/attempts.h"

namespace xpyd {

// Sent by this instance; cumulative.
struct SenderStats {
  int64_t transfers = 0, bytes = 0, descriptors = 0;
  double seconds = 0;  // planning and posting
};

class KvSender {
 public:
  KvSender(InstanceParts& parts, StreamKv stream) : parts_(parts), stream_(stream) {}

  // The attempt will leave for `decode`; its sequence goes to the engine now.
  void expect(AttemptId attempt, DisaggOrder order, InstanceId decode);

  // The engine's hooks, for sequences that leave.
  void started(const Sequence& sequence);
  void kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_end);
  void done(std::vector<SequencePtr> choices);
  void cancelled(const Sequence& sequence);

  void handle(InstanceId from, KvReserved message);
  // Of a peer that has no part in the attempt they mean nothing.
  void handle(InstanceId from, const KvTaken& message);
  void handle(InstanceId from, const ReservationCancelled& message);
  void renewed(InstanceId from, AttemptId attempt);
  // Gives up what is shared with the peer. `why`: for the conductor; "" where it knows.
  void peer_gone(InstanceId peer, const std::string& why = "");

  bool poll();  // true: something moved
  // Attempts that stand here and belong to peers, too.
  void renewals(std::unordered_map<InstanceId, std::vector<AttemptId>>& of_peer) const;
  // Ends what waits here; nothing is told to peers.
  void clear(FinishReason reason, const std::string& error);

  bool has(AttemptId attempt) const { return outgoing_.contains(attempt); }
  bool empty() const { return outgoing_.empty(); }
  int sending() const;
  const SenderStats& stats() const { return stats_; }

 private:
  struct Outgoing {
    DisaggOrder order = DisaggOrder::push;
    InstanceId peer = -1;
    bool computing = true;  // the engine has its sequence
    bool told = false;      // the peer knows of it
    int n_tokens = 0;       // told: for which it was asked for room
    double until_s = 0;     // told: of the request
    std::optional<KvPlace> destination;
    std::vector<int> sent;  // [n_layers]: tokens already posted
    struct Flight {
      TransferId id;
      KvLease lease;  // the source blocks stay while they are read
      double post_s;
      size_t bytes;
    };
    std::vector<Flight> in_flight;
    int posts = 0;
    bool failed = false;               // a transfer has
    bool delivered = false;            // the last post has been posted, and the peer told
    bool over = false;                 // nothing (more) will be delivered
    KvHandle kv = kNoKv;               // set with `choices`
    std::vector<SequencePtr> choices;  // the prompt is done: prefill_sending
    std::optional<WindowKey> offered;  // pull: the peer may read
    std::optional<KvHandover> given;   // between processes: until the peer has taken it, or not
    double deadline_s = 0;             // without a word of the peer
  };

  void send_kv(Outgoing& out, KvHandle kv, int layer_begin, int layer_end, int token_end);
  void offer(AttemptId attempt, Outgoing& out);
  void end_waiting(Outgoing& out);
  void give_up(AttemptId attempt, Outgoing& out, AttemptFailure reason, const std::string& why);
  bool finish(AttemptId attempt, Outgoing& out);
  void deliver(AttemptId attempt, Outgoing& out);

  InstanceParts& parts_;
  const StreamKv stream_;
  std::unordered_map<AttemptId, Outgoing> outgoing_;
  TransferPlan plan_;
  SenderStats stats_;
};

}  // namespace xpyd
