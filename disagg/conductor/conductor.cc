#include "disagg/conductor/conductor.h"

#include <chrono>
#include <utility>

namespace xpyd::disagg {

Conductor::Conductor(ConductorOptions options, Clock& clock, MessageBus& bus)
    : context_{.options = std::move(options), .clock = clock, .bus = bus, .random = Random(options.seed)},
      cluster_(context_),
      requests_(context_),
      attempts_(context_, cluster_, requests_),
      jobs_(context_, cluster_, attempts_),
      planner_(context_, cluster_, requests_, attempts_) {}

// ---- Instances join and leave.

InstanceId Conductor::new_id() {
  std::lock_guard lock(mutex_);
  return cluster_.new_id();
}

void Conductor::joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe) {
  act([&](Out& out) {
    cluster_.join(std::move(info), std::move(probe));
    retry_parked(out);
    jobs_.dispatch();
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

void Conductor::receive(InstanceId from, Message message) {
  act([&](Out& out) {
    if (cluster_.heard(from)) std::visit([&](auto& m) { on(from, std::move(m), out); }, message);
  });
}

// One thread delivers at a time, so a sink gets its events in their order. A request is over when its last event has
// been delivered.
void Conductor::deliver() {
  Out events;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (outbox_.empty()) {
        delivering_ = false;
        if (requests_.empty()) idle_.notify_all();
        return;
      }
      events.swap(outbox_);
    }
    for (auto& [sink, event] : events) sink->on_event(std::move(event));
    events.clear();
  }
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
  AttemptPlan plan(entry, first, count, jobs_.size());
  if (!planner_.choose(plan)) return false;
  planner_.decide_fetch(plan);
  if (const Refusal refusal = planner_.refuses(plan)) {
    requests_.refuse(entry, refusal, context_.totals.refused_early, out);
    return true;
  }
  planner_.decide_order(plan);
  planner_.check_fetch(plan);
  requests_.mark_placed(entry, cluster_.at(plan.attempt.decode).info);
  const AttemptId number = attempts_.add(plan.attempt);
  for (int c = first; c < first + count; ++c) {
    Choice& one = entry.choices[size_t(c)];
    one.attempt = number;
    if (entry.tries == 0) one.ttft_s = plan.ttft_s, one.tbt_s = plan.at_decode().step_with_s;
  }
  tell(plan, number);
  return true;
}

// Sends the attempt to the instance that begins it.
void Conductor::tell(AttemptPlan& plan, AttemptId number) {
  constexpr double kPatience = 30;  // seconds that a fetch may take where its policy has no limit
  const Attempt& attempt = plan.attempt;
  const Choice& choice = plan.choice();
  const double saved_s = plan.fetch.view.saved_s, most = context_.options.fetch->most;
  StartRequest message{.attempt = number,
                       .request = plan.entry.request,
                       .state = {.choice = attempt.first,
                                 .stands_for = attempt.count,
                                 .output = choice.output,
                                 .logits_hash = choice.logits_hash,
                                 .queued_s = plan.entry.request->arrival_s,
                                 .scheduled_s = choice.scheduled_s},
                       .remote = attempt.order != DisaggOrder::local,
                       .decode = attempt.decode,
                       .fetch = {.holder = plan.fetch.holder,
                                 .tokens = plan.fetch.view.holder_tokens,
                                 .worth_s = saved_s,
                                 .limit_s = most > 0 ? most * saved_s : kPatience}};
  const bool at_decode = attempt.order == DisaggOrder::decode_first || attempt.order == DisaggOrder::local;
  context_.bus.send(kConductor, at_decode ? attempt.decode : attempt.prefill, std::move(message));
}

// ---- The service as a whole.

ServiceStats Conductor::stats() const {
  std::lock_guard lock(mutex_);
  ServiceStats all;
  all.shared_pool = shared_pool_;
  all.conductor = context_.totals;
  all.conductor.prefill_jobs = jobs_.size();
  for (const auto& [id, member] : cluster_.members()) all.instances.push_back(member.probe->stats());
  return all;
}

ServicePicture Conductor::picture() const {
  std::lock_guard lock(mutex_);
  ServicePicture all;
  all.t = context_.clock.now();
  for (const auto& [id, member] : cluster_.members())
    if (auto map = member.probe->block_map()) all.maps[member.info.name] = std::move(map);
  all.traces = requests_.traces();
  return all;
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
    jobs_.clear();
  });
}

uint64_t Conductor::logits_hash() const {
  std::lock_guard lock(mutex_);
  return requests_.logits_hash();
}

PlacedLoad Conductor::load(InstanceId id) const {
  std::lock_guard lock(mutex_);
  const Member* member = cluster_.find(id);
  return member ? member->load : PlacedLoad{};
}

size_t Conductor::known_blocks(InstanceId id) const {
  std::lock_guard lock(mutex_);
  const Member* member = cluster_.find(id);
  return member ? cluster_.board().known_blocks(*member) : 0;
}

ConductorStats Conductor::totals() const {
  std::lock_guard lock(mutex_);
  return context_.totals;
}

std::vector<InstanceInfo> Conductor::members() const {
  std::lock_guard lock(mutex_);
  std::vector<InstanceInfo> all;
  for (const auto& [id, member] : cluster_.members()) all.push_back(member.info);
  return all;
}

}  // namespace xpyd::disagg
