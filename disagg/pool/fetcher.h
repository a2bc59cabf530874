// The reader's side of a fetch (README.md): before a prompt is computed here, the part of its prefix that others have
// is read from them, over the wire, into blocks of this instance. Room comes first, for all of it or none; then each
// holder is asked for its part of the tokens, and read when it has answered. What has come is compared with its
// checksums, and used up to the first gap. Whatever fails, or takes longer than it is worth, is computed.
//
// Layer by layer (Mooncake, section 3.3's loading): each layer is a read of its own, and the prompt goes on when the
// first one is there; each layer of its first step waits for its own before it attends. Where checksums are
// wanted, which are of all layers, and where other threads compute, the prompt waits for all.
//
// Thread safety: the instance's thread.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "disagg/handover/attempts.h"
#include "disagg/handover/kv_room.h"
#include "disagg/handover/leases.h"

namespace xpyd::disagg::pool {

// How one ended.
struct Fetched {
  uint64_t request;
  InstanceId from;  // the first of its holders
  double begin_s, end_s;
  int tokens;  // that came
  int64_t bytes;
  double worth_s;  // FetchOrder
};

class Fetcher {
 public:
  // Goes on with a prompt: `kv` has its first `tokens` tokens; kNoKv: nothing came that is not in the prefix cache.
  // `arrival`: of these tokens some are still coming; null: they are there.
  using Begin = std::function<void(StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival)>;
  Fetcher(InstanceParts& parts, const Attempts& attempts, const handover::KvRoom& room, bool by_layer, Begin begin)
      : parts_(parts), attempts_(attempts), room_(room), by_layer_(by_layer), begin_(std::move(begin)) {}

  void start(StartRequest message);
  void handle(InstanceId from, KvLent message);
  void peer_gone(InstanceId peer);
  bool tick();  // true: something moved
  // Ends what waits here; nothing is told to holders.
  void clear(FinishReason reason, const std::string& error, Attempts& attempts);
  void add_shared(handover::SharedAttempts& of_peer) const;

  bool has(AttemptId attempt) const { return fetches_.contains(attempt); }
  bool empty() const { return fetches_.empty() && quarantine_.empty(); }
  bool counts() const { return reading_; }         // nobody but the wire tells when a read is done
  std::function<void(const Fetched&)> ended = {};  // null: nobody asks
  // f(request, handle) of each prompt whose KV comes.
  template <class F>
  void each_holder(F&& f) const {
    for (const auto& [attempt, fetch] : fetches_)
      if (fetch.kv != kNoKv) f(fetch.request, fetch.kv);
  }

 private:
  struct Part {
    enum State : uint8_t { asked, reading, here, lost };
    InstanceId holder;
    int begin, end;  // tokens
    State state = asked;
    KvPlace source = {};
    std::vector<TransferId> reads = {};  // of each layer, or of all at once; -1: done
    size_t done = 0;                     // so many of them, from the first on
    double read_s = 0;
    size_t bytes = 0;
  };
  class Arrival;
  struct Fetch {
    StartRequest message;  // until it begins
    AttemptId attempt = 0;
    uint64_t request = 0, salt = 0;
    double worth_s = 0;
    std::vector<int32_t> tokens;
    KvHandle kv = kNoKv;  // … and so is this
    int here = 0;         // tokens that were,
    int wanted = 0;       // and that there are to be
    std::vector<Part> parts;
    double asked_s = 0, until_s = 0;  // Clock
    int64_t bytes = 0;
    std::shared_ptr<Arrival> arrival = {};  // its sequence has begun, and has the handle; what is read has this lease:
    KvLease lease = -1;
  };
  struct Late {  // nobody waits for it, and its blocks may still be written
    KvHandle kv;
    KvLease lease;
    std::vector<TransferId> reads;
  };

  void ask(Fetch& fetch);
  void read(Fetch& fetch, Part& part, KvLent& lent);
  void look(Fetch& fetch, Part& part);
  void lose(Fetch& fetch, Part& part);
  bool begins(const Fetch& fetch) const;
  void begin(Fetch& fetch);
  bool wait(Fetch& fetch, int layer);
  void finish(Fetch& fetch);
  void count(const Fetch& fetch, int tokens);
  std::vector<TransferId> cancel(Fetch& fetch);

  InstanceParts& parts_;
  const Attempts& attempts_;
  const handover::KvRoom& room_;
  const bool by_layer_;
  const Begin begin_;
  std::map<AttemptId, Fetch> fetches_;
  std::vector<Late> quarantine_;
  bool reading_ = false;
  TransferPlan plan_;
};

}  // namespace xpyd::disagg::pool
