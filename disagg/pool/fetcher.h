// The reader's side of a fetch (README.md): before a prompt is computed here, the part of its prefix that another
// instance has is read from it into blocks of this instance. Blocks for the whole part are reserved first. Then the
// holder is asked, and read in one transfer when it has answered. KV that fails or is late is computed.
//
// A copy of a prompt (--decode-copies) is a fetch after which no prompt starts: its blocks stay in the prefix cache. A
// copy without room, or whose KV fails or is late, is dropped.
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
  InstanceId from;
  double begin_s, end_s;
  int tokens;  // that arrived
  int64_t bytes;
  double worth_s;  // FetchOrder
};

class Fetcher {
 public:
  // Starts a prompt whose first `tokens` tokens are in `kv`. kNoKv: nothing is there.
  using Begin = std::function<void(StartRequest message, KvHandle kv, int tokens)>;
  Fetcher(InstanceParts& parts, const Attempts& attempts, const handover::KvRoom& room, Begin begin)
      : parts_(parts), attempts_(attempts), room_(room), begin_(std::move(begin)) {}

  void start(StartRequest message);
  void handle(InstanceId from, CopyKv message);
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
    for (const auto& [attempt, fetch] : fetches_) f(fetch.message.request->id, fetch.kv);
  }

 private:
  struct Fetch {
    enum State : uint8_t { asked, reading, here, lost };
    StartRequest message;
    InstanceId holder = -1;
    std::vector<int32_t> tokens;
    KvHandle kv = kNoKv;
    int begin = 0, end = 0;  // the tokens to fetch
    bool copy = false;       // no prompt waits for it
    State state = asked;
    KvPlace source = {};
    TransferId read = handover::kNoTransfer;
    double asked_s = 0, read_s = 0, until_s = 0;  // Clock
    size_t bytes = 0;
  };
  struct Late {  // an abandoned fetch, whose read may still write its blocks
    KvHandle kv;
    TransferId read;
  };

  bool ask(StartRequest& message, bool copy);
  void look(Fetch& fetch);
  void lose(Fetch& fetch);
  void finish(Fetch& fetch);
  void count(const Fetch& fetch, int tokens);
  bool give_up(Fetch& fetch);

  InstanceParts& parts_;
  const Attempts& attempts_;
  const handover::KvRoom& room_;
  const Begin begin_;
  std::map<AttemptId, Fetch> fetches_;
  std::vector<Late> quarantine_;
  bool reading_ = false;
  TransferPlan plan_;
};

}  // namespace xpyd::disagg::pool
