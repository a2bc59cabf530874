// Conductor: the messages of attempts, and how a failed attempt is placed anew.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "disagg/conductor/conductor.h"

namespace xpyd::disagg {

void Conductor::on(InstanceId from, AttemptProgress message, Out& out) {
  Attempt* const attempt = attempts_.find(message.attempt);
  if (!attempt) return;
  const bool grants = message.stage == AttemptProgress::granted;
  const bool at_decode = grants || message.stage == AttemptProgress::joined;
  if (from != (at_decode ? attempt->decode : attempt->prefill)) return;
  const double now = context_.clock.now();
  Entry& entry = requests_.at(attempt->request);
  if (grants) {
    requests_.mark(entry, &RequestTrace::granted);
  } else if (at_decode) {
    attempt->joins_s = now;
    requests_.mark(entry, &RequestTrace::joined);
  } else if (message.stage == AttemptProgress::prompt_done) {
    attempts_.uncharge_prompt(*attempt);
    requests_.mark(entry, &RequestTrace::prompt_done);
    if (!refused_late(message.attempt, out)) attempt->joins_s = now;
  } else if (attempts_.begin_prompt(*attempt)) {
    requests_.mark(entry, &RequestTrace::started);
    jobs_.dispatch();
  }
}

void Conductor::on(InstanceId from, TokenOf message, Out& out) {
  Attempt* const attempt = attempts_.find(message.attempt);
  if (!attempt) return;
  if (from != attempt->prefill && from != attempt->decode) return;  // the attempt is not on this instance
  Entry& entry = requests_.at(attempt->request);
  Choice& choice = entry.choices[size_t(message.event.choice)];
  if (choice.ended || message.index < int(choice.output.size())) return;
  message.event.request_id = entry.request->id;
  if (message.index > int(choice.output.size())) {  // it arrived before tokens of the other instance
    choice.early.emplace(message.index, std::move(message.event));
    return;
  }
  choice.latest = from;
  if (message.event.token >= 0) attempts_.generated(*attempt);
  requests_.take(entry, choice, std::move(message.event), out);
  while (!choice.ended && !choice.early.empty() && choice.early.begin()->first == int(choice.output.size())) {
    choice.latest = attempt->decode;  // only the decode instance's tokens can arrive early
    requests_.take(entry, choice, std::move(choice.early.extract(choice.early.begin()).mapped()), out);
  }
  if (!choice.ended) return;
  if (--attempt->left == 0) forget(message.attempt);
  requests_.forget_if_over(entry);
}

// A decode instance has reserved KV blocks for a prompt that any prefill instance may compute.
void Conductor::on(InstanceId, PrefillJob job, Out&) {
  if (!attempts_.find(job.attempt)) return;
  jobs_.add(std::move(job));
  jobs_.dispatch();
}

// The prompt is done. Admission may still refuse the request before it joins the decode batch.
bool Conductor::refused_late(AttemptId number, Out& out) {
  const Attempt attempt = attempts_.at(number);
  const Refusal refusal = planner_.refuses_late(attempt);
  if (!refusal) return false;
  Entry& entry = requests_.at(attempt.request);
  forget(number);
  call_off(number, attempt);
  context_.totals.wasted_prefill_s += attempt.prompt_s;
  requests_.refuse(entry, refusal, context_.totals.refused_late, out);
  requests_.forget_if_over(entry);
  return true;
}

// ---- Attempts end.

void Conductor::forget(AttemptId number) {
  if (attempts_.forget(number)) jobs_.dispatch();
}

void Conductor::call_off(AttemptId number, const Attempt& attempt) {
  for (InstanceId id : {attempt.prefill, attempt.decode})
    if (cluster_.find(id)) context_.bus.send(kConductor, id, AbortAttempt{number});
  jobs_.remove(number);
}

void Conductor::on(InstanceId from, AttemptFailed message, Out& out) {
  const Attempt* const attempt = attempts_.find(message.attempt);
  if (!attempt) return;
  if (from != attempt->prefill && from != attempt->decode) return;  // the attempt is not on this instance
  if (from == attempt->prefill && from != attempt->decode && attempts_.handed_over(*attempt)) return;
  fail(message.attempt, message.why, out);
}

// Places the unfinished choices anew, unless the client has left, the deadline is over, or the tries are used up.
void Conductor::fail(AttemptId number, const std::string& why, Out& out) {
  const ConductorOptions& options = context_.options;
  const Attempt attempt = attempts_.at(number);
  forget(number);
  ++context_.totals.failed_attempts;
  call_off(number, attempt);
  Entry& entry = requests_.at(attempt.request);
  const bool late = entry.request->deadline_s > 0 && context_.clock.now() > entry.request->deadline_s;
  const bool hopeless = ++entry.tries >= options.max_tries * int(entry.choices.size());
  if (hopeless)
    log_line(LogLevel::error, "xpyd: request %llu is given up after %d failed attempts: %s",
             static_cast<unsigned long long>(entry.request->id), entry.tries, why.c_str());
  bool begun = false;
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c) {
    Choice& choice = entry.choices[size_t(c)];
    begun |= choice.ended || !choice.output.empty();
    choice.early.clear();
    choice.latest = -1;
    choice.attempt = 0;
    if (choice.ended) continue;
    ++context_.totals.replaced_choices;
    if (entry.aborted || late || hopeless)
      requests_.give_up(entry, c, late, "the request is given up after too many attempts: " + why, out);
  }
  if (entry.left == 0) return requests_.forget_if_over(entry);
  park(attempt, begun);
  retry_parked(out);
}

// Choices that have no token yet stay one attempt. Otherwise each choice becomes an attempt of its own.
void Conductor::park(const Attempt& attempt, bool begun) {
  const Entry& entry = requests_.at(attempt.request);
  const double now = context_.clock.now();
  const double later = now + (entry.tries < 2 ? 0 : 0.04 * double(1 << 2 * std::min(entry.tries - 2, 2)));
  if (!begun) {
    parked_.push_back({attempt.request, attempt.first, attempt.count, now, later});
    return;
  }
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c)
    if (!entry.choices[size_t(c)].ended) parked_.push_back({attempt.request, c, 1, now, later});
}

void Conductor::retry_parked(Out& out) {
  const double now = context_.clock.now();
  std::vector<Parked> parked;
  parked.swap(parked_);
  for (Parked& p : parked) {
    Entry& entry = requests_.at(p.request);
    const double deadline = entry.request->deadline_s;
    const bool late = deadline > 0 && now > deadline;
    const bool waited = now > p.since_s + context_.options.patience_s;
    if (!entry.aborted && !late && now >= p.not_before_s && start(p.request, p.first, p.count, out)) continue;
    if (!entry.aborted && !late && !waited) {
      parked_.push_back(p);
      continue;
    }
    for (int c = p.first; c < p.first + p.count; ++c)
      requests_.give_up(entry, c, late, "no instance came to replace the one that was lost", out);
    requests_.forget_if_over(entry);
  }
}

void Conductor::abort(uint64_t request_id) {
  act([&](Out& out) {
    Entry* const entry = requests_.find(request_id);
    if (!entry) return;
    entry->aborted = true;
    AttemptId last = 0;
    for (const Choice& choice : entry->choices) {
      if (choice.ended || choice.attempt == 0 || choice.attempt == last) continue;
      last = choice.attempt;
      call_off(last, attempts_.at(last));
    }
    retry_parked(out);
  });
}

}  // namespace xpyd::disagg
