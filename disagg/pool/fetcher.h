// The reader's side of a fetch (README.md). Before a prompt is computed here, the transport reads the part of its
// prefix that other instances have into blocks of this instance. Room for all of it is reserved first. Then each holder
// is asked for its part of the tokens, and its part is read when it has answered. The KV that has arrived is compared
// with its checksums, and used up to the first gap. A part that fails, or takes longer than it is worth, is computed.
//
// Layer by layer (Mooncake, section 3.3): each layer is a read of its own. The prompt starts when the first layer is
// there, and each layer of its first step waits for that layer's KV before it attends. The prompt waits for all layers
// if checksums are wanted, because they cover all layers, and if other threads compute.
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

// How a fetch ended.
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
  // Continues a prompt. `kv` has its first `tokens` tokens; kNoKv: nothing arrived that is not in the prefix cache.
  // `arrival`: some of these tokens are still arriving; null: all are there.
  using Begin = std::function<void(StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival)>;
  Fetcher(InstanceParts& parts, const Attempts& attempts, const handover::KvRoom& room, bool by_layer, Begin begin)
      : parts_(parts), attempts_(attempts), room_(room), by_layer_(by_layer), begin_(std::move(begin)) {}

  void start(StartRequest message);
  void handle(InstanceId from, KvLent message);
  void peer_gone(InstanceId peer);
  bool tick();  // true: something moved
  // Ends the prompts that wait here. Holders get no message.
  void clear(FinishReason reason, const std::string& error, Attempts& attempts);
  void add_shared(handover::SharedAttempts& of_peer) const;

  bool has(AttemptId attempt) const { return fetches_.contains(attempt); }
  bool empty() const { return fetches_.empty() && quarantine_.empty(); }
  bool counts() const { return reading_; }         // true: only polling the transport tells when a read is done
  std::function<void(const Fetched&)> ended = {};  // may be null
  // Calls f(request, handle) for each prompt whose KV arrives.
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
    std::vector<TransferId> reads = {};  // one for each layer, or one for all; -1: done
    size_t done = 0;                     // number of reads that are done, from the first on
    double read_s = 0;
    size_t bytes = 0;
  };
  class Arrival;
  struct Fetch {
    StartRequest message;  // moved out when the prompt begins
    AttemptId attempt = 0;
    uint64_t request = 0, salt = 0;
    double worth_s = 0;
    std::vector<int32_t> tokens;
    KvHandle kv = kNoKv;  // likewise
    int here = 0;         // tokens that were here before
    int wanted = 0;       // tokens that should be here after the fetch
    std::vector<Part> parts;
    double asked_s = 0, until_s = 0;  // Clock
    int64_t bytes = 0;
    std::shared_ptr<Arrival> arrival = {};  // set: its sequence has begun and has the handle; `lease` holds the blocks
    KvLease lease = -1;
  };
  struct Late {  // nobody waits for it, but its blocks may still be written
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
