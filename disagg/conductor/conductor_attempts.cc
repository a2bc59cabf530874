// Conductor: what comes of an attempt, and what is done with the rest of one that fails.
#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "base/siphash.h"
#include "disagg/conductor/conductor.h"
#include "disagg/conductor/event_log.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

void Conductor::on(InstanceId from, AttemptProgress message, Out& out) {
  auto found = attempts_.find(message.attempt);
  if (found == attempts_.end()) return;
  Attempt& attempt = found->second;
  const bool grants = message.stage == AttemptProgress::granted;
  const bool at_decode = grants || message.stage == AttemptProgress::joined;
  if (from != (at_decode ? attempt.decode : attempt.prefill)) return;
  const double now = clock_.now();
  Entry& entry = requests_.at(attempt.request);
  if (grants) {
    mark(entry, &RequestLife::granted);
  } else if (at_decode) {
    attempt.joins_s = now;
    mark(entry, &RequestLife::joined);
  } else if (message.stage == AttemptProgress::prompt_done) {
    uncharge_prompt(attempt);
    mark(entry, &RequestLife::prompt_done);
    if (!refused_late(message.attempt, out)) attempt.joins_s = now;
  } else if (std::exchange(attempt.queued, false)) {
    begin(entry);
    mark(entry, &RequestLife::started);
    board_.begun(members_.at(from), attempt.prompt, now);
    uncharge_lender(attempt);
    dispatch_jobs();
  }
}

void Conductor::on(InstanceId from, TokenOf message, Out& out) {
  auto found = attempts_.find(message.attempt);
  if (found == attempts_.end()) {
    ++totals_.late_tokens;
    return;
  }
  Attempt& attempt = found->second;
  if (from != attempt.prefill && from != attempt.decode) return;  // not its to say
  const int at = message.event.choice;
  if (at < attempt.first || at >= attempt.first + attempt.count) return;
  const uint64_t request = attempt.request;
  Entry& entry = requests_.at(request);
  Choice& choice = entry.choices[size_t(at)];
  const int most = entry.request->max_tokens;
  if (choice.ended || message.index < int(choice.output.size()) || message.index > most) return;
  // What is placed anew goes on from these tokens: they come from another process.
  if (message.event.token >= 0 &&
      (message.index == most || (message.index + 1 == most && message.event.finish == FinishReason::none)))
    return fail(message.attempt, AttemptFailure::refused, "it goes on beyond its last token", out);
  message.event.request_id = entry.request->id;
  if (message.index > int(choice.output.size())) {  // it has overtaken the other instance's
    choice.early.emplace(message.index, std::move(message.event));
    return;
  }
  choice.latest = from;
  if (Member* member = find(attempt.decode); member && message.event.token >= 0) {
    ++attempt.context;
    board_.decodes(*member, 0, 1);
  }
  take(entry, choice, std::move(message.event), out);
  while (!choice.ended && !choice.early.empty() && choice.early.begin()->first == int(choice.output.size())) {
    choice.latest = attempt.decode;  // what overtakes comes from the second of the two
    take(entry, choice, std::move(choice.early.extract(choice.early.begin()).mapped()), out);
  }
  if (!choice.ended) return;
  if (--attempt.left == 0) forget(message.attempt);
  forget_choice(request, entry);
}

void Conductor::take(Entry& entry, Choice& choice, TokenEvent event, Out& out) {
  if (event.token >= 0) {
    choice.times.token(clock_.now());
    if (choice.output.empty()) totals_.ttft_error.add(choice.ttft_s, choice.times.first_s - entry.request->arrival_s);
    choice.output.push_back(event.token);
    if (choice.output.size() > choice.placed + size_t(options_.crash_tokens)) choice.crashes = 0;
    choice.logits_hash = event.logits_hash;
  }
  // A choice that was placed anew tells of its first time.
  if (choice.cached_tokens < 0) {
    choice.cached_tokens = event.cached_tokens;
    choice.scheduled_s = event.scheduled_s;
  }
  event.cached_tokens = choice.cached_tokens;
  event.scheduled_s = choice.scheduled_s;
  if (event.finish == FinishReason::stop || event.finish == FinishReason::length) {
    logits_hash_ += event.logits_hash;
    ++totals_.ended;
    if (const auto gaps = double(choice.times.gaps.size()); gaps > 0)
      totals_.tbt_error.add(choice.tbt_s, (choice.times.last_s - choice.times.first_s) / gaps);
    totals_.kept += choice.times.keeps(objectives(*entry.request), entry.request->arrival_s);
  }
  if (event.finish != FinishReason::none) {
    choice.ended = true;
    --entry.left;
  }
  if (event.finish != FinishReason::none) entry.life.finish = finish_reason_name(event.finish);
  emit(entry, std::move(event), out);
}

void Conductor::end_choice(Entry& entry, int at, FinishReason reason, const std::string& error, Out& out,
                           double retry_s) {
  Choice& choice = entry.choices[size_t(at)];
  TokenEvent event;
  event.request_id = entry.request->id;
  event.choice = at;
  event.finish = reason;
  event.error = error;
  event.retry_s = retry_s;
  event.logits_hash = choice.logits_hash;
  event.cached_tokens = std::max(0, choice.cached_tokens);
  event.queued_s = entry.request->arrival_s;
  event.scheduled_s = choice.scheduled_s;
  event.time_s = clock_.now();
  choice.ended = true;
  --entry.left;
  entry.life.finish = finish_reason_name(reason);
  emit(entry, std::move(event), out);
}

// Now is `when`. False: its second token is there, and an attempt that comes after it is of no interest to the log.
bool Conductor::mark(Entry& entry, double RequestLife::*when) {
  if (!entry.choices[0].times.gaps.empty()) return false;
  entry.life.*when = clock_.now();
  return true;
}

// Of its first choice; what was replaced meanwhile shows in `attempts`.
RequestLife Conductor::life_of(const Entry& entry) {
  const Choice& choice = entry.choices[0];
  RequestLife life = entry.life;
  life.request = entry.request->id;
  life.t = entry.request->arrival_s;
  life.first = std::max(0.0, choice.times.first_s);
  life.second = choice.times.gaps.empty() ? 0 : life.first + double(choice.times.gaps[0]);
  life.prompt = int(entry.request->prompt.size());
  life.cached = std::max(0, choice.cached_tokens);
  life.output = int(choice.output.size());
  life.attempts = entry.tries + 1;
  return life;
}

void Conductor::give_up(Entry& entry, int choice, bool late, const std::string& why, Out& out) {
  if (entry.aborted) return end_choice(entry, choice, FinishReason::abort, "", out);
  end_choice(entry, choice, late ? FinishReason::timeout : FinishReason::error, late ? "" : why, out);
}

void Conductor::forget_choice(uint64_t request, Entry& entry) {
  if (entry.left > 0) return;
  constexpr size_t kMostEnded = 50;
  ended_.push_front(life_of(entry));
  ended_.front().ended = clock_.now();
  if (options_.log) {
    RequestLife whole = ended_.front();
    whole.gaps = entry.choices[0].times.gaps;
    options_.log->happened("request", whole);
  }
  if (ended_.size() > kMostEnded) ended_.pop_back();
  begin(entry);
  requests_.erase(request);
}

// ---- Attempts end.

const char* failure_name(AttemptFailure why) {
  static constexpr const char* kNames[] = {"instance_gone",   "instance_silent", "peer_silent", "peer_unknown",
                                           "connection_lost", "given_up",        "refused"};
  static_assert(std::size(kNames) == kAttemptFailures);
  return kNames[size_t(why)];
}

// Nothing more can come of the prefill instance: what it put out is here, and what it knew is on the other one.
bool Conductor::handed_over(const Attempt& attempt) const {
  const Entry& entry = requests_.at(attempt.request);
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c) {
    const Choice& choice = entry.choices[size_t(c)];
    if (!choice.ended && choice.latest != attempt.decode) return false;
  }
  return true;
}

// As far as the conductor knows: the prompt has begun there, or its KV has gone there.
bool Conductor::computes(InstanceId id, const Attempt& a) const {
  if (id == a.prefill) return !a.queued;
  return a.prefill >= 0 && !a.prompting;
}

// An instance has ended in the middle of these. Whose turn it was nobody knows: a request that has
// ended several alone is what they died of; several of them are tried again one after the other,
// until each has got on or is the only one that it can have been.
void Conductor::blame(InstanceId id, const std::vector<AttemptId>& attempts) {
  std::vector<uint64_t> often;
  for (AttemptId number : attempts) {
    const Attempt& attempt = attempts_.at(number);
    if (attempts.size() > 1 && !computes(id, attempt)) continue;  // alone: it may be how it came
    Entry& entry = requests_.at(attempt.request);
    for (int c = attempt.first; c < attempt.first + attempt.count; ++c)
      if (Choice& choice = entry.choices[size_t(c)]; !choice.ended && ++choice.crashes >= options_.max_crashes)
        often.push_back(attempt.request);
  }
  if (!often.empty() && std::ranges::count(often, often[0]) == long(often.size())) requests_.at(often[0]).guilty = true;
}

bool Conductor::suspect(uint64_t request, int choice) const {
  return requests_.at(request).choices[size_t(choice)].crashes >= options_.max_crashes;
}

bool Conductor::suspect_runs() const {
  return std::ranges::any_of(attempts_,
                             [this](const auto& entry) { return suspect(entry.second.request, entry.second.first); });
}

void Conductor::uncharge_prompt(Attempt& attempt) {
  if (!std::exchange(attempt.prompting, false)) return;
  if (Member* member = find(attempt.prefill)) board_.done(*member, attempt.prompt, clock_.now());
}

// The prefix is there, or nobody waits for it.
void Conductor::uncharge_lender(Attempt& attempt) {
  if (Member* lender = find(std::exchange(attempt.lender, -1))) lender->load.lends_s -= attempt.lends_s;
}

void Conductor::forget(AttemptId number) {
  auto found = attempts_.find(number);
  Attempt& attempt = found->second;
  uncharge_lender(attempt);
  const bool freed = attempt.queued && find(attempt.prefill);
  if (freed) board_.begun(*find(attempt.prefill), attempt.prompt, clock_.now());
  uncharge_prompt(attempt);
  if (Member* member = find(attempt.decode)) {
    board_.decodes(*member, -attempt.count, -attempt.context);
    member->load.ended_s = clock_.now();
    member->decoding.erase(number);
    if (attempt.left == 0 && !attempt.prompting) member->decodes.ended(clock_.now() - attempt.joins_s);
  }
  attempts_.erase(found);
  if (freed) dispatch_jobs();
}

void Conductor::call_off(AttemptId number, const Attempt& attempt) {
  for (InstanceId id : {attempt.prefill, attempt.decode})
    if (find(id)) post_.send(kConductor, id, AbortAttempt{number});
  std::erase_if(jobs_, [number](const PrefillJob& job) { return job.attempt == number; });
}

void Conductor::on(InstanceId from, AttemptFailed message, Out& out) {
  auto found = attempts_.find(message.attempt);
  if (found == attempts_.end()) return;
  const Attempt& attempt = found->second;
  if (from != attempt.prefill && from != attempt.decode) return;  // not its to say
  if (from == attempt.prefill && from != attempt.decode && handed_over(attempt)) return;
  fail(message.attempt, message.reason, message.why, out);
}

// What is left of the attempt starts anew: all choices together where they have not begun, else one by one.
void Conductor::fail(AttemptId number, AttemptFailure reason, const std::string& why, Out& out) {
  const Attempt attempt = attempts_.at(number);
  forget(number);
  ++totals_.failed_attempts;
  ++totals_.failed_by[size_t(reason)];
  call_off(number, attempt);
  Entry& entry = requests_.at(attempt.request);
  const bool late = entry.request->deadline_s > 0 && clock_.now() > entry.request->deadline_s;
  const bool hopeless = ++entry.tries > options_.max_tries * int(entry.choices.size());
  if (entry.guilty || hopeless) {
    const std::vector<int32_t>& prompt = entry.request->prompt;
    const std::string_view bytes(reinterpret_cast<const char*>(prompt.data()), prompt.size() * sizeof prompt[0]);
    log_line(LogLevel::error,
             "xpyd: request %llu is given up: %d %s it; its prompt has %zu tokens and the hash %016llx",
             static_cast<unsigned long long>(entry.request->id), entry.guilty ? options_.max_crashes : entry.tries,
             entry.guilty ? "instances in a row ended while they computed" : "attempts failed at", prompt.size(),
             static_cast<unsigned long long>(siphash({}, bytes)));
  }
  bool begun = false;
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c) {
    Choice& choice = entry.choices[size_t(c)];
    begun |= choice.ended || !choice.output.empty();
    choice.early.clear();
    choice.latest = -1;
    choice.attempt = 0;
    if (choice.ended) continue;
    ++totals_.replaced_choices;
    if (entry.aborted || late || entry.guilty || hopeless)
      give_up(entry, c, late,
              (entry.guilty ? "given up: instances ended while they computed it: " : "given up after many attempts: ") +
                  why,
              out);
  }
  if (entry.left == 0) return forget_choice(attempt.request, entry);
  const double now = clock_.now();
  const double later = now + (entry.tries < 3 ? 0 : 0.01 * double(1 << std::min(entry.tries - 3, 6)));
  if (!begun) {
    parked_.push_back({attempt.request, attempt.first, attempt.count, now, later});
  } else {
    for (int c = attempt.first; c < attempt.first + attempt.count; ++c)
      if (!entry.choices[size_t(c)].ended) parked_.push_back({attempt.request, c, 1, now, later});
  }
  retry_parked(out);
}

void Conductor::retry_parked(Out& out) {
  const double now = clock_.now();
  std::vector<Parked> parked;
  parked.swap(parked_);
  for (Parked& p : parked) {
    Entry& entry = requests_.at(p.request);
    const bool its_turn = !suspect(p.request, p.first) || !suspect_runs();
    if (!its_turn) p.since_s = now;
    const double deadline = entry.request->deadline_s;
    const bool late = deadline > 0 && now > deadline;
    const bool waited = now > p.since_s + options_.patience_s;
    if (!entry.aborted && !late && now >= p.not_before_s && its_turn && start(p.request, p.first, p.count, out))
      continue;
    if (!entry.aborted && !late && !waited) {
      parked_.push_back(p);
      continue;
    }
    for (int c = p.first; c < p.first + p.count; ++c)
      give_up(entry, c, late, "no instance came to take its place", out);
    forget_choice(p.request, entry);
  }
}

void Conductor::abort(uint64_t request_id) {
  act([&](Out& out) {
    auto found = requests_.find(request_id);
    if (found == requests_.end()) return;
    found->second.aborted = true;
    AttemptId last = 0;
    for (const Choice& choice : found->second.choices) {
      if (choice.ended || choice.attempt == 0 || choice.attempt == last) continue;
      last = choice.attempt;
      call_off(last, attempts_.at(last));
    }
    retry_parked(out);
  });
}

}  // namespace xpyd::disagg
