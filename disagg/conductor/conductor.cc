#include "disagg/conductor/conductor.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/log.h"

namespace xpyd::disagg {

Conductor::Conductor(ConductorOptions options, Clock& clock, MessageBus& bus)
    : context_{.options = std::move(options), .clock = clock, .bus = bus, .random = Random(options.seed)},
      cluster_(context_),
      requests_(context_),
      attempts_(context_, cluster_, requests_),
      planner_(context_, cluster_, requests_, attempts_) {}

// ---- The lock, and events outside it.

// Calls f(out) under the lock. The events are delivered outside it, in the order of these calls: by the calling thread,
// or by another one that is delivering already.
template <class F>
void Conductor::act(F f) {
  {
    std::lock_guard lock(mutex_);
    f(outbox_);
    if (outbox_.empty() || std::exchange(delivering_, true)) return;
  }
  deliver();
}

// One thread delivers at a time, so a sink gets its events in their order. A request is over when its last event has
// been delivered.
void Conductor::deliver() {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (outbox_.empty()) {
        delivering_ = false;
        if (requests_.empty()) idle_.notify_all();
        return;
      }
      in_delivery_.swap(outbox_);
    }
    for (auto& [sink, event] : in_delivery_) sink->on_event(std::move(event));
    in_delivery_.clear();
  }
}

// ---- Instances join and leave.

InstanceId Conductor::new_id() {
  std::lock_guard lock(mutex_);
  return cluster_.new_id();
}

void Conductor::joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe) {
  act([&](Out& out) {
    cluster_.join(std::move(info), std::move(probe));
    retry_parked(out);
    attempts_.dispatch();
  });
}

void Conductor::left(InstanceId id, const std::string& why) {
  act([&](Out& out) { remove(id, why, out); });
}

// Places the instance's attempts anew, except those that it has handed over.
void Conductor::remove(InstanceId id, const std::string& why, Out& out) {
  if (!cluster_.leave(id)) return;
  for (AttemptId attempt : attempts_.hit_by_end_of(id)) fail(attempt, why, out);
  retry_parked(out);
}

void Conductor::drain(InstanceId id, bool on) {
  std::lock_guard lock(mutex_);
  if (Member* member = cluster_.find(id)) cluster_.board().drain(*member, on);
}

bool Conductor::idle(InstanceId id) const {
  std::lock_guard lock(mutex_);
  return attempts_.idle(id);
}

void Conductor::tick() {
  act([&](Out& out) {
    for (InstanceId id : cluster_.silent()) remove(id, "an instance stopped responding", out);
    retry_parked(out);
  });
}

void Conductor::receive(InstanceId from, Message&& message) {
  act([&](Out& out) {
    if (cluster_.heard(from)) std::visit([&](auto& m) { on(from, std::move(m), out); }, message);
  });
}

// ---- New requests.

Status Conductor::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  // The client of a refused request has its only event when this returns: the HTTP status depends on it.
  Out refusal;
  std::unique_lock lock(mutex_);
  const Status taken = take_in(std::move(request), std::move(sink), refusal);
  if (refusal.empty()) return taken;
  ++refusing_;
  lock.unlock();
  for (auto& [to, event] : refusal) to->on_event(std::move(event));
  lock.lock();
  if (--refusing_ == 0) idle_.notify_all();
  return taken;
}

Status Conductor::take_in(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink, Out& out) {
  const int max_model_len = context_.options.max_model_len;
  const long longest = long(request->prompt.size()) + request->max_tokens;
  if (longest > max_model_len)
    return invalid("prompt and max_tokens need " + std::to_string(longest) + " tokens, but the context has " +
                   std::to_string(max_model_len));
  if (draining_) return Error{ErrorCode::unavailable, "the server is shutting down"};
  if (cluster_.members().empty()) return Error{ErrorCode::unavailable, "there is no instance"};
  for (const auto& [id, member] : cluster_.members()) {
    const InstanceInfo& info = member.info;
    if (request->n > info.max_batch)
      return invalid("n is " + std::to_string(request->n) + ", but --max-batch is " + std::to_string(info.max_batch));
    const long blocks = (longest + info.block_tokens - 1) / info.block_tokens;
    if (blocks > info.capacity_blocks)
      return invalid("prompt and max_tokens need " + std::to_string(blocks) + " KV blocks, but an instance has " +
                     std::to_string(info.capacity_blocks));
  }
  const uint64_t id = request->id;
  const int n = request->n;
  Entry& entry = requests_.add(std::move(request), std::move(sink));
  if (start(id, 0, n, out)) {
    requests_.forget_if_over(entry);  // the request may have been refused
    return ok();
  }
  requests_.erase(id);
  return Error{ErrorCode::unavailable, "there is no instance that can take the request"};
}

// Places choices [first, first + count) of a request. Returns false if no instance can take them.
bool Conductor::start(uint64_t id, int first, int count, Out& out) {
  Entry& entry = requests_.at(id);
  AttemptPlan plan(entry, first, count, attempts_.jobs());
  if (!planner_.choose(plan)) return false;
  planner_.decide_fetch(plan);
  if (const Refusal refusal = planner_.refuses(plan)) {
    requests_.refuse(entry, refusal, context_.totals.refused_early, out);
    return true;
  }
  planner_.decide_order(plan);
  requests_.mark_placed(entry, cluster_.at(plan.attempt.decode).info);
  const AttemptId number = attempts_.add(plan.attempt);
  for (int c = first; c < first + count; ++c) {
    Choice& one = entry.choices[size_t(c)];
    one.attempt = number;
    if (entry.tries == 0) one.ttft_s = plan.ttft_s, one.tbt_s = plan.at_decode().step_with_s;
  }
  const InstanceId begins = plan.attempt.prefill >= 0 ? plan.attempt.prefill : plan.attempt.decode;
  context_.bus.send(kConductor, begins, planner_.message(plan, number));
  return true;
}

// ---- Messages of attempts.

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
    if (refused_late(message.attempt, out)) return;
    attempt->joins_s = now;
    copy_prompt(message.attempt, *attempt);
  } else if (attempts_.begin_prompt(*attempt)) {
    requests_.mark(entry, &RequestTrace::started);
  }
}

void Conductor::on(InstanceId from, TokenOf&& message, Out& out) {
  Attempt* const attempt = attempts_.find(message.attempt);
  if (!attempt || (from != attempt->prefill && from != attempt->decode)) return;
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
  if (--attempt->left == 0) attempts_.forget(message.attempt);
  requests_.forget_if_over(entry);
}

// A decode instance has reserved KV blocks for a prompt that any prefill instance may compute.
void Conductor::on(InstanceId, PrefillJob job, Out&) {
  if (attempts_.find(job.attempt)) attempts_.add_job(std::move(job));
}

// The prompt is done. Admission may still refuse the request before it joins the decode batch.
bool Conductor::refused_late(AttemptId number, Out& out) {
  const Attempt attempt = attempts_.at(number);
  const Refusal refusal = planner_.refuses_late(attempt);
  if (!refusal) return false;
  Entry& entry = requests_.at(attempt.request);
  attempts_.forget(number);
  call_off(number, attempt);
  context_.totals.wasted_prefill_s += attempt.prompt_s;
  requests_.refuse(entry, refusal, context_.totals.refused_late, out);
  requests_.forget_if_over(entry);
  return true;
}

// The prompt is done. The next decode instances after D, in the order of their numbers, read its whole blocks from P.
void Conductor::copy_prompt(AttemptId number, const Attempt& attempt) {
  const std::shared_ptr<const Request>& request = requests_.at(attempt.request).request;
  const Member* const prefill = cluster_.find(attempt.prefill);
  if (attempt.order == DisaggOrder::local || request->prompt_logprobs >= 0 || !prefill) return;
  const int block = prefill->info.block_tokens;
  const int tokens = (int(request->prompt.size()) - 1) / block * block;
  std::vector<InstanceId> others;
  for (const auto& [id, member] : cluster_.members())
    if (member.info.role == Role::decode && !member.draining && id != attempt.decode) others.push_back(id);
  std::rotate(others.begin(), std::ranges::upper_bound(others, attempt.decode), others.end());
  const size_t most = tokens > 0 ? size_t(context_.options.decode_copies - 1) : 0;
  for (size_t i = 0; i < std::min(most, others.size()); ++i)
    context_.bus.send(kConductor, others[i], CopyKv{number, request, attempt.prefill, tokens});
}

// ---- Attempts end.

void Conductor::call_off(AttemptId number, const Attempt& attempt) {
  for (InstanceId id : {attempt.prefill, attempt.decode})
    if (cluster_.find(id)) context_.bus.send(kConductor, id, AbortAttempt{number});
  attempts_.drop_job(number);
}

void Conductor::on(InstanceId from, AttemptFailed message, Out& out) {
  const Attempt* const attempt = attempts_.find(message.attempt);
  if (!attempt || (from != attempt->prefill && from != attempt->decode)) return;
  if (from == attempt->prefill && from != attempt->decode && attempts_.handed_over(*attempt)) return;
  fail(message.attempt, message.why, out);
}

// Places the unfinished choices anew, unless the client has left, the deadline is over, or the tries are used up.
void Conductor::fail(AttemptId number, const std::string& why, Out& out) {
  const ConductorOptions& options = context_.options;
  const Attempt attempt = attempts_.at(number);
  attempts_.forget(number);
  ++context_.totals.failed_attempts;
  call_off(number, attempt);
  Entry& entry = requests_.at(attempt.request);
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
    if (entry.aborted || hopeless || requests_.late(entry))
      requests_.give_up(entry, c, "the request is given up after too many attempts: " + why, out);
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
  const int each = begun ? 1 : attempt.count;
  for (int c = attempt.first; c < attempt.first + attempt.count; c += each)
    if (!entry.choices[size_t(c)].ended) parked_.push_back({attempt.request, c, each, now, later});
}

void Conductor::retry_parked(Out& out) {
  const double now = context_.clock.now();
  std::vector<Parked> parked;
  parked.swap(parked_);
  for (Parked& p : parked) {
    Entry& entry = requests_.at(p.request);
    const bool wanted = !entry.aborted && !requests_.late(entry);
    if (wanted && now >= p.not_before_s && start(p.request, p.first, p.count, out)) continue;
    if (wanted && now <= p.since_s + context_.options.patience_s) {
      parked_.push_back(p);
      continue;
    }
    for (int c = p.first; c < p.first + p.count; ++c)
      requests_.give_up(entry, c, "no instance came to replace the one that was lost", out);
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

// ---- The service as a whole.

ServiceStats Conductor::stats() const {
  std::lock_guard lock(mutex_);
  ServiceStats all{.conductor = context_.totals};
  all.shared_pool = context_.options.zero_copy && cluster_.members().size() > 1;
  for (const auto& [id, member] : cluster_.members()) all.instances.push_back(member.probe->stats());
  return all;
}

ServicePicture Conductor::picture() const {
  std::lock_guard lock(mutex_);
  return {context_.clock.now(), requests_.traces()};
}

std::string Conductor::trouble() const {
  std::lock_guard lock(mutex_);
  return cluster_.trouble();
}

void Conductor::drain() {
  std::lock_guard lock(mutex_);
  draining_ = true;
}

bool Conductor::wait_idle(double seconds) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, std::chrono::duration<double>(seconds),
                        [&] { return requests_.empty() && !delivering_ && refusing_ == 0; });
}

void Conductor::end_all(const std::string& why) {
  act([&](Out& out) {
    requests_.end_all(why, out);
    attempts_.clear();
    parked_.clear();
  });
}

std::vector<InstanceInfo> Conductor::members() const {
  std::lock_guard lock(mutex_);
  std::vector<InstanceInfo> all;
  for (const auto& [id, member] : cluster_.members()) all.push_back(member.info);
  return all;
}

}  // namespace xpyd::disagg
