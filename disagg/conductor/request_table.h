// The requests in flight, their choices, and each choice's tokens in order. The table turns tokens and ends into
// events. A request leaves the table when all its choices have ended.
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
#include "disagg/request_trace.h"

namespace xpyd::disagg {

struct SinkEvent {
  std::shared_ptr<EventSink> sink;
  TokenEvent event;
};
using SinkEvents = std::vector<SinkEvent>;  // in the order of delivery

class RequestTable {
 public:
  struct Choice {
    std::vector<int32_t> output;
    uint64_t logits_hash = 0;
    bool ended = false;
    AttemptId attempt = 0;            // 0: parked
    InstanceId latest = -1;           // the instance that sent its last token
    std::map<int, TokenEvent> early;  // by index: tokens that arrived before their predecessors
    int cached_tokens = -1;
    double scheduled_s = 0;
    TokenTimes times;
    double ttft_s = 0, tbt_s = 0;  // predicted at the first placement
  };
  struct Entry {
    std::shared_ptr<const Request> request;
    std::shared_ptr<EventSink> sink;
    std::vector<Choice> choices;
    int left = 0;
    int tries = 0;
    bool aborted = false;
    RequestTrace trace;  // the part that trace_of() cannot derive
  };

  explicit RequestTable(ConductorContext& context) : context_(context) {}

  // Adds a request. Requires: its id is not in the table.
  Entry& add(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink);
  Entry* find(uint64_t id);
  Entry& at(uint64_t id) { return requests_.at(id); }
  const Entry& at(uint64_t id) const { return requests_.at(id); }
  void erase(uint64_t id) { requests_.erase(id); }
  bool empty() const { return requests_.empty(); }

  // Takes the choice's next token, or its end without a token.
  void take(Entry& entry, Choice& choice, TokenEvent&& event, SinkEvents& out);
  // Ends the choice without another token.
  void end_choice(Entry& entry, int choice, FinishReason reason, const std::string& error, SinkEvents& out);
  // Returns whether the request's deadline is over.
  bool late(const Entry& entry) const;
  // Ends the choice with `abort` if its client has left, with `timeout` if it is late, and with an error otherwise.
  void give_up(Entry& entry, int choice, const std::string& why, SinkEvents& out);
  // Ends every open choice with the refusal's reason and prediction. `counted` is one of the totals.
  void refuse(Entry& entry, const Refusal& refusal, int64_t& counted, SinkEvents& out);
  // Removes the entry if all its choices have ended. The reference is invalid then.
  void forget_if_over(Entry& entry);
  void end_all(const std::string& why, SinkEvents& out);

  // Sets `when` in the request's trace to the present time. Returns false after the second token, because the log does
  // not follow later attempts.
  bool mark(Entry& entry, double RequestTrace::*when);
  // Begins the trace of a new attempt, whose choices decode on `decode`.
  void mark_placed(Entry& entry, const InstanceInfo& decode);

  // Returns some running requests and the last that ended, newest first, without their gaps.
  std::vector<RequestTrace> traces() const;

 private:
  static RequestTrace trace_of(const Entry& entry);
  static void emit(Entry& entry, TokenEvent&& event, SinkEvents& out);

  ConductorContext& context_;
  std::unordered_map<uint64_t, Entry> requests_;
  std::deque<RequestTrace> ended_;  // the last ones, newest first, without gaps
};

}  // namespace xpyd::disagg
