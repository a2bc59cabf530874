#include "disagg/conductor/request_table.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "disagg/conductor/event_log.h"

namespace xpyd::disagg {

Objectives ConductorContext::objectives(const Request& request) const {
  Objectives own = options.objectives;
  if (own.ttft_s <= 0) own.ttft_s = kNoObjectives.ttft_s;
  if (own.tbt_s <= 0 || request.max_tokens <= 1) own.tbt_s = kNoObjectives.tbt_s;  // a one-token answer has no TBT
  return own;
}

// ---- New requests.

RequestTable::Entry& RequestTable::add(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  Entry& entry = requests_[request->id];
  entry.choices.resize(size_t(request->n));
  entry.left = request->n;
  entry.request = std::move(request);
  entry.sink = std::move(sink);
  return entry;
}

RequestTable::Entry* RequestTable::find(uint64_t id) {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : &found->second;
}

// ---- Tokens and ends.

void RequestTable::take(Entry& entry, Choice& choice, TokenEvent&& event, SinkEvents& out) {
  ConductorStats& totals = context_.totals;
  if (event.token >= 0) {
    choice.times.token(context_.clock.now());
    if (choice.output.empty()) totals.ttft_error.add(choice.ttft_s, choice.times.first_s - entry.request->arrival_s);
    choice.output.push_back(event.token);
    choice.logits_hash = event.logits_hash;
  }
  // A choice that was placed anew reports the values of its first placement.
  if (choice.cached_tokens < 0) {
    choice.cached_tokens = event.cached_tokens;
    choice.scheduled_s = event.scheduled_s;
    // The message that a prompt begins may arrive with its first token (HeldMessages).
    if (entry.trace.started > 0 && event.scheduled_s > 0) entry.trace.started = event.scheduled_s;
  }
  event.cached_tokens = choice.cached_tokens;
  event.scheduled_s = choice.scheduled_s;
  if (event.finish == FinishReason::stop || event.finish == FinishReason::length) {
    totals.logits_hash += event.logits_hash;
    ++totals.ended;
    if (const auto gaps = double(choice.times.gaps.size()); gaps > 0)
      totals.tbt_error.add(choice.tbt_s, (choice.times.last_s - choice.times.first_s) / gaps);
    totals.kept += choice.times.keeps(context_.objectives(*entry.request), entry.request->arrival_s);
  }
  emit(entry, std::move(event), out);
}

void RequestTable::emit(Entry& entry, TokenEvent&& event, SinkEvents& out) {
  if (event.finish != FinishReason::none) {
    entry.choices[size_t(event.choice)].ended = true;
    --entry.left;
    entry.trace.finish = finish_reason_name(event.finish);
  }
  out.push_back({entry.sink, std::move(event)});
}

void RequestTable::end_choice(Entry& entry, int at, FinishReason reason, const std::string& error, SinkEvents& out) {
  const Choice& choice = entry.choices[size_t(at)];
  TokenEvent event;
  event.request_id = entry.request->id;
  event.choice = at;
  event.finish = reason;
  event.error = error;
  event.logits_hash = choice.logits_hash;
  event.cached_tokens = std::max(0, choice.cached_tokens);
  event.queued_s = entry.request->arrival_s;
  event.scheduled_s = choice.scheduled_s;
  event.time_s = context_.clock.now();
  emit(entry, std::move(event), out);
}

bool RequestTable::late(const Entry& entry) const {
  return entry.request->deadline_s > 0 && context_.clock.now() > entry.request->deadline_s;
}

void RequestTable::give_up(Entry& entry, int choice, const std::string& why, SinkEvents& out) {
  if (entry.aborted) return end_choice(entry, choice, FinishReason::abort, "", out);
  if (late(entry)) return end_choice(entry, choice, FinishReason::timeout, "", out);
  end_choice(entry, choice, FinishReason::error, why, out);
}

void RequestTable::refuse(Entry& entry, const Refusal& refusal, int64_t& counted, SinkEvents& out) {
  static constexpr const char* kNames[] = {"none", "ttft", "tbt", "room"};
  static constexpr const char* kUnits[] = {"", " s", " s", " tokens"};
  static_assert(std::size(kNames) == int(Refusal::room) + 1);
  char why[160];
  std::snprintf(why, sizeof why, "%s: %.4g%s predicted, but at most %.4g%s allowed", kNames[refusal.why],
                refusal.predicted, kUnits[refusal.why], refusal.objective, kUnits[refusal.why]);
  ++counted;
  for (int c = 0; c < int(entry.choices.size()); ++c)
    if (!entry.choices[size_t(c)].ended) end_choice(entry, c, FinishReason::refused, why, out);
}

void RequestTable::forget_if_over(Entry& entry) {
  if (entry.left > 0) return;
  constexpr size_t kMostEnded = 50;
  ended_.push_front(trace_of(entry));
  ended_.front().ended = context_.clock.now();
  if (EventLog* const log = context_.options.log.get()) {
    RequestTrace whole = ended_.front();
    whole.gaps = entry.choices[0].times.gaps;
    log->happened("request", whole);
  }
  if (ended_.size() > kMostEnded) ended_.pop_back();
  requests_.erase(ended_.front().request);
}

void RequestTable::end_all(const std::string& why, SinkEvents& out) {
  for (auto& [id, entry] : requests_)
    for (int c = 0; c < int(entry.choices.size()); ++c)
      if (!entry.choices[size_t(c)].ended) end_choice(entry, c, FinishReason::abort, why, out);
  requests_.clear();
}

// ---- Request traces, for the log and the demo page.

bool RequestTable::mark(Entry& entry, double RequestTrace::*when) {
  if (!entry.choices[0].times.gaps.empty()) return false;
  entry.trace.*when = context_.clock.now();
  return true;
}

void RequestTable::mark_placed(Entry& entry, const InstanceInfo& decode) {
  if (!mark(entry, &RequestTrace::placed)) return;
  RequestTrace& trace = entry.trace;
  trace.started = trace.prompt_done = trace.granted = trace.joined = 0;  // times of an earlier attempt
  trace.kv_token_bytes = context_.options.kv_bytes_scale * double(decode.layout.shape.token_bytes());
  trace.prefill = "", trace.decode = decode.name;
}

// Describes the first choice. Retries show in `attempts`.
RequestTrace RequestTable::trace_of(const Entry& entry) {
  const Choice& choice = entry.choices[0];
  RequestTrace trace = entry.trace;
  trace.request = entry.request->id;
  trace.t = entry.request->arrival_s;
  trace.first = std::max(0.0, choice.times.first_s);
  trace.second = choice.times.gaps.empty() ? 0 : trace.first + double(choice.times.gaps[0]);
  trace.prompt = int(entry.request->prompt.size());
  trace.cached = std::max(0, choice.cached_tokens);
  trace.output = int(choice.output.size());
  trace.attempts = entry.tries + 1;
  return trace;
}

std::vector<RequestTrace> RequestTable::traces() const {
  constexpr size_t kMostRunning = 16;
  std::vector<RequestTrace> traces;
  for (const auto& [id, entry] : requests_) {
    if (traces.size() == kMostRunning) break;
    traces.push_back(trace_of(entry));
  }
  traces.insert(traces.end(), ended_.begin(), ended_.end());
  return traces;
}

}  // namespace xpyd::disagg
