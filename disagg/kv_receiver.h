// The decode side of an instance: promises of room to prefill instances, and the KV that comes
// (disagg/README.md draws the state machine).
//
// Thread safety: the instance's thread.
#pragma once

#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "batch/engine.h"
#include "disagg/attempts.h"

namespace xpyd {

// Cumulative.
struct ReceiverStats {
  int64_t refused_kv = 0;  // deliveries whose KV was short, late or changed: computed again here
  int64_t expired = 0;     // promises given up because the peer was silent
  int64_t transfers = 0, bytes = 0, descriptors = 0;  // pull: of its posts
  double seconds = 0;                                 // … planning and posting
};

class KvReceiver {
 public:
  KvReceiver(InstanceParts& parts, Attempts& attempts, Engine& engine)
      : parts_(parts), attempts_(attempts), engine_(engine) {}

  // decode_first: this instance has the request; any prefill instance will compute its KV.
  void start(StartRequest message);
  void handle(InstanceId from, ReserveKv message);
  void handle(InstanceId from, KvDelivered message);
  void handle(InstanceId from, KvOffered message);
  void handle(InstanceId from, const ReservationCancelled& message);
  void renewed(InstanceId from, AttemptId attempt);
  // Gives up what is shared with the peer. `why`: for the conductor; "" where it knows.
  void peer_gone(InstanceId peer, const std::string& why = "");

  bool poll();
  void renewals(std::unordered_map<InstanceId, std::vector<AttemptId>>& of_peer) const;
  // Nothing is told to anybody but the ends of sequences that wait here.
  void clear(FinishReason reason, const std::string& error);

  // Posts of what was delivered are on their way: nobody but the wire tells when they have arrived.
  bool counts() const { return !finished_prefills_.empty(); }
  bool has(AttemptId attempt) const { return incoming_.contains(attempt); }
  bool empty() const { return incoming_.empty() && quarantine_.empty(); }
  int expected() const { return int(incoming_.size()); }
  const ReceiverStats& stats() const { return stats_; }

 private:
  struct Incoming {
    DisaggOrder order = DisaggOrder::push;
    InstanceId from = -1;  // decode_first: -1 until a prefill instance has taken it
    std::shared_ptr<const Request> request;
    std::vector<int32_t> tokens;  // whose KV comes: prompt, and output of an earlier attempt
    std::vector<ChoiceState> choices;
    SequencePtr sequence;  // decode_first
    KvPlace source;        // pull
    bool granted = false;
    bool loading = false;  // not granted: what a tier has of it is held already
    KvHandle kv = kNoKv;   // kNoKv for a zero-copy transport
    KvLease lease = 0;
    int cached_tokens = 0;
    std::optional<WindowKey> window;    // the peer may write
    std::optional<TransferId> reading;  // pull
    double read_s = 0;                  // its post
    size_t read_bytes = 0;
    bool delivered = false;
    bool arrived = true;  // false: the KV will not come whole
    int posts = 0;        // that are still to be counted in the window
    std::vector<uint64_t> checksums;
    std::optional<KvHandover> handover;
    double deadline_s = 0;  // without a word of the peer
    std::string refusal;    // why the wire gave no window
    int n_choices() const { return request->n; }
  };
  // Blocks whose KV is not wanted any more, until nobody can write there.
  struct Quarantine {
    std::optional<WindowKey> window;
    std::optional<TransferId> reading;
    KvLease lease;
  };

  bool grant_waiting();
  bool grant(AttemptId attempt, Incoming& in);
  bool reserve(AttemptId attempt, Incoming& in);
  void promise(AttemptId attempt, Incoming& in);
  void read(Incoming& in);
  bool finish(AttemptId attempt, Incoming& in);
  bool is_coming(AttemptId attempt, const Incoming& in) const;
  bool is_whole(const Incoming& in) const;
  void adopt(AttemptId attempt, Incoming& in, bool whole);
  bool drop_ended(AttemptId attempt, Incoming& in);
  void drop(AttemptId attempt);
  void give_back(InstanceId from, AttemptId attempt, std::optional<KvHandover>& handover);
  bool free_quarantined();

  InstanceParts& parts_;
  Attempts& attempts_;
  Engine& engine_;
  std::unordered_map<AttemptId, Incoming> incoming_;
  std::deque<AttemptId> remote_prefilling_;   // want room: not yet granted
  std::vector<AttemptId> finished_prefills_;  // delivered, or being read
  std::vector<Quarantine> quarantine_;
  int granted_choices_ = 0;
  TransferPlan plan_;
  ReceiverStats stats_;
};

}  // namespace xpyd
