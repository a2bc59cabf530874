// The reader's side of a fetch (README.md): before a prompt is computed here, the part of its prefix that others have
// is read from them into blocks of this instance. Blocks for the whole part are reserved first. Then each holder is
// asked for its share of the tokens, and read when it has answered. The KV that arrived is used up to
// the first gap. KV that fails or is late is computed.
//
// Layer by layer (Mooncake, section 3.3): each layer is a read of its own, and the prompt starts when the first one is
// there. Each layer of its first step waits for that layer's KV. The prompt waits for all layers if other threads
// compute.
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

// The end of a fetch.
struct Fetched {
  uint64_t request;
  InstanceId from;  // the first of its holders
  double begin_s, end_s;
  int tokens;  // that arrived
  int64_t bytes;
  double worth_s;  // FetchOrder
};

class Fetcher {
 public:
  // Starts a prompt whose first `tokens` tokens are in `kv`. kNoKv: all that arrived is in the prefix cache. `arrival`
  // tells when the KV of these tokens is there; null: it is.
  using Begin = std::function<void(StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival)>;
  Fetcher(InstanceParts& parts, const Attempts& attempts, const handover::KvRoom& room, bool by_layer, Begin begin)
      : parts_(parts), attempts_(attempts), room_(room), by_layer_(by_layer), begin_(std::move(begin)) {}

  void start(StartRequest message);
  void handle(InstanceId from, KvLent message);
  void peer_gone(InstanceId peer);
  bool tick();  // true: something moved
  // Ends all fetches, and the prompts that wait for them. Tells holders FetchOver.
  void clear(FinishReason reason, const std::string& error, Attempts& attempts);
  void add_shared(handover::SharedAttempts& of_peer) const;

  bool has(AttemptId attempt) const { return fetches_.contains(attempt); }
  bool empty() const { return fetches_.empty() && quarantine_.empty(); }
  bool counts() const { return reading_; }         // true: reads are in flight, and only polls tell their end
  std::function<void(const Fetched&)> ended = {};  // null: not wanted
  // Calls f(request, handle) for each prompt whose KV is being fetched.
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
    size_t done = 0;                     // reads that are done, from the first on
    double read_s = 0;
    size_t bytes = 0;
  };
  class Arrival;
  struct Fetch {
    StartRequest message;  // valid until the prompt starts
    AttemptId attempt = 0;
    uint64_t request = 0, salt = 0;
    double worth_s = 0;
    std::vector<int32_t> tokens;
    KvHandle kv = kNoKv;  // valid until the prompt starts
    int here = 0;         // tokens that this instance had before
    int wanted = 0;       // tokens that it is to have
    std::vector<Part> parts;
    double asked_s = 0, until_s = 0;  // Clock
    int64_t bytes = 0;
    std::shared_ptr<Arrival> arrival = {};  // set: the prompt has started, and its sequence owns the handle
    KvLease lease = -1;                     // then keeps the blocks that reads still write
  };
  struct Late {  // an abandoned fetch, whose reads may still write its blocks
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
