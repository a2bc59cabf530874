// The requests that are being served, their choices, and the tokens of each in order. Tokens and ends become events
// here, and a request whose choices have all ended leaves the table.
//
// Thread safety: none; the conductor locks, and passes events on to their sinks once its lock is free.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "disagg/conductor/conductor_options.h"
#include "disagg/conductor/token_times.h"
#include "disagg/life.h"

namespace xpyd::disagg {

struct SinkEvent {
  std::shared_ptr<EventSink> sink;
  TokenEvent event;
};
using SinkEvents = std::vector<SinkEvent>;  // in the order in which they are to be passed on

// What a request holds here while it waits: its prompt, and some for all the rest.
int64_t queue_bytes(const Request& request);

class RequestTable {
 public:
  struct Choice {
    std::vector<int32_t> output;
    uint64_t logits_hash = 0;
    bool ended = false;
    AttemptId attempt = 0;            // 0: parked
    InstanceId latest = -1;           // where its last token came from
    std::map<int, TokenEvent> early;  // by index: what overtook others
    int cached_tokens = -1;
    double scheduled_s = 0;
    int crashes = 0;    // instances that ended in a row while they computed it
    size_t placed = 0;  // output's length when its attempt began
    TokenTimes times;
    double ttft_s = 0, tbt_s = 0;  // predicted when it was placed first
  };
  struct Entry {
    std::shared_ptr<const Request> request;
    std::shared_ptr<EventSink> sink;
    std::vector<Choice> choices;
    int left = 0;
    int tries = 0;
    bool aborted = false;
    bool begun = false;   // else it counts in queued_bytes_
    bool guilty = false;  // it ends the instances that compute it
    RequestLife life;     // as far as life_of() does not know it
  };

  explicit RequestTable(ConductorContext& context) : context_(context) {}

  Entry& add(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink);
  Entry* find(uint64_t id);
  Entry& at(uint64_t id) { return requests_.at(id); }
  const Entry& at(uint64_t id) const { return requests_.at(id); }
  void erase(uint64_t id) { requests_.erase(id); }
  bool empty() const { return requests_.empty(); }

  // Requests that wait for their first step hold at most max_queue_bytes together, or only one of them waits.
  bool has_room(const Request& request) const;
  void wait(const Entry& entry) { queued_bytes_ += queue_bytes(*entry.request); }
  void begin(Entry& entry);  // It waits no more. Later calls do nothing.

  // Takes the choice's next token, or its end without one.
  void take(Entry& entry, Choice& choice, TokenEvent event, SinkEvents& out);
  // The choice ends here, without another token.
  void end_choice(Entry& entry, int choice, FinishReason reason, const std::string& error, SinkEvents& out,
                  double retry_s = 0);
  // … with `abort` where its client has left, with `timeout` where it is late, else with an error.
  void give_up(Entry& entry, int choice, bool late, const std::string& why, SinkEvents& out);
  // Every choice that has not ended ends with why, and with what was predicted. `counted` is one of the totals.
  void refuse(Entry& entry, const Refusal& refusal, int64_t& counted, SinkEvents& out);
  // The entry leaves the table if all its choices have ended, and is not to be used then.
  void forget_if_over(Entry& entry);
  void end_all(const std::string& why, SinkEvents& out);

  // Writes the present time into the request's life. False: the second token is there, and the log has no interest in
  // attempts after it.
  bool mark(Entry& entry, double RequestLife::*when);
  // Begins the life of a new attempt, whose choices decode on `decode`.
  void mark_placed(Entry& entry, const InstanceInfo& decode);

  // Some that are not over, and the last that are, newest first; all without gaps.
  std::vector<RequestLife> lives() const;
  // Order-independent sum over the choices that ended by stop or length of their logits hash.
  uint64_t logits_hash() const { return logits_hash_; }

 private:
  static RequestLife life_of(const Entry& entry);
  static void emit(Entry& entry, TokenEvent event, SinkEvents& out) { out.push_back({entry.sink, std::move(event)}); }

  ConductorContext& context_;
  std::unordered_map<uint64_t, Entry> requests_;
  std::deque<RequestLife> ended_;  // the last, without gaps; newest first
  int64_t queued_bytes_ = 0;
  uint64_t logits_hash_ = 0;
};

}  // namespace xpyd::disagg
