#include "disagg/conductor.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace xpyd {
namespace {

std::vector<int32_t> tokens_of(const Request& request, const std::vector<int32_t>& output) {
  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), output.begin(), output.end());
  return tokens;
}

double ratio(double seconds, int64_t n) { return n > 0 ? seconds / double(n) : 0; }

}  // namespace

Conductor::Conductor(ConductorOptions options, Clock& clock, Post& post)
    : options_(options), clock_(clock), post_(post), random_(options.seed) {}

Conductor::~Conductor() = default;

// ---- Instances come and go.

InstanceId Conductor::new_id() {
  std::lock_guard lock(mutex_);
  return ++last_id_;
}

void Conductor::joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe) {
  Out out;
  {
    std::lock_guard lock(mutex_);
    const InstanceId id = info.id;
    for (auto& [other, member] : members_) {
      post_.send(kConductor, other, PeerJoined{info});
      post_.send(kConductor, id, PeerJoined{member.info});
    }
    Member& member = members_[id];
    member.info = std::move(info);
    member.probe = std::move(probe);
    member.heard_s = clock_.now();
    member.cache.set_capacity(member.info.capacity_blocks);
    ++totals_.joined;
    retry_parked(out);
    dispatch_jobs();
  }
  pass_on(out);
}

void Conductor::left(InstanceId id, const std::string& why) {
  Out out;
  {
    std::lock_guard lock(mutex_);
    remove(id, why, out);
  }
  pass_on(out);
}

// Its attempts are placed anew, but for those that it has handed over.
void Conductor::remove(InstanceId id, const std::string& why, Out& out) {
  if (members_.erase(id) == 0) return;
  ++totals_.left;
  for (auto& [other, member] : members_) post_.send(kConductor, other, PeerGone{id});
  std::vector<AttemptId> hit;
  for (const auto& [attempt, a] : attempts_)
    if (a.decode == id || (a.prefill == id && !handed_over(a))) hit.push_back(attempt);
  std::sort(hit.begin(), hit.end());  // the same order on every machine
  for (AttemptId attempt : hit) fail(attempt, why, out);
  retry_parked(out);
}

void Conductor::drain(InstanceId id, bool on) {
  std::lock_guard lock(mutex_);
  if (Member* member = find(id)) member->draining = on;
}

bool Conductor::idle(InstanceId id) const {
  std::lock_guard lock(mutex_);
  return std::none_of(attempts_.begin(), attempts_.end(), [id](const auto& entry) {
    return entry.second.prefill == id || entry.second.decode == id;
  });
}

Conductor::Member* Conductor::find(InstanceId id) {
  auto found = members_.find(id);
  return found == members_.end() ? nullptr : &found->second;
}

void Conductor::tick() {
  Out out;
  {
    std::lock_guard lock(mutex_);
    const double now = clock_.now();
    std::vector<InstanceId> silent;
    if (options_.lease_s > 0)
      for (const auto& [id, member] : members_)
        if (now > member.heard_s + options_.lease_s) silent.push_back(id);
    for (InstanceId id : silent) remove(id, "an instance fell silent", out);
    retry_parked(out);
  }
  pass_on(out);
}

// ---- Placing.

int Conductor::promised(const Member& member, PromptHashes& prompt) {
  const std::optional<int> known = member.probe->promise(prompt.tokens(), prompt.salt());
  return known ? *known : member.cache.promise(prompt, member.info.block_tokens);
}

// A snapshot and a pure policy. -1: nobody is there.
Placement Conductor::place(PromptHashes& prompt) {
  views_.clear();
  view_ids_.clear();
  for (auto& [id, member] : members_) {
    if (member.draining) continue;
    InstanceView view;
    view.role = member.info.role;
    view.queued_tokens = member.load.queued_tokens;
    view.sequences = member.load.sequences;
    view.available_blocks = member.probe->kv().available();
    if (view.role != Role::decode) view.cached_tokens = promised(member, prompt);
    views_.push_back(view);
    view_ids_.push_back(id);
  }
  return options_.placement->place({.instances = views_,
                                    .prompt_tokens = int(prompt.tokens().size()),
                                    .random = random_.next()});
}

// Places choices [first, first + count) of a request. False: there is nobody to place them on.
bool Conductor::start(uint64_t id, int first, int count) {
  Entry& entry = requests_.at(id);
  const Request& request = *entry.request;
  Choice& choice = entry.choices[size_t(first)];
  const std::vector<int32_t> tokens = tokens_of(request, choice.output);
  PromptHashes prompt(tokens, request.cache_salt);
  const Placement placed = place(prompt);
  if (placed.prefill < 0 || placed.decode < 0) return false;
  const InstanceView &p = views_[size_t(placed.prefill)], &d = views_[size_t(placed.decode)];

  Attempt attempt{.request = id, .first = first, .count = count, .left = count};
  attempt.decode = view_ids_[size_t(placed.decode)];
  attempt.prefill = view_ids_[size_t(placed.prefill)];
  Member &prefill = members_.at(attempt.prefill), &decode = members_.at(attempt.decode);
  int cached = p.cached_tokens;  // where the prompt is computed
  if (placed.prefill != placed.decode) {
    const InstanceStats ps = prefill.probe->stats(), ds = decode.probe->stats();
    const int cached_decode = promised(decode, prompt);
    DisaggView view{.tokens = int(tokens.size()),
                    .cached_decode = cached_decode,
                    .cached_prefill = p.cached_tokens,
                    .prefill_jobs = int(jobs_.size()),
                    .prefill_queued_tokens = p.queued_tokens,
                    .decode_queued_tokens = d.queued_tokens,
                    .decode_sequences = d.sequences};
    view.prefill_s_per_token = ratio(ps.step_seconds, ps.prompt_tokens);
    view.decode_s_per_token = view.prefill_s_per_token;
    view.step_s = ratio(ds.step_seconds, ds.steps);
    const InstanceStats& poster = options_.disagg_options.pull ? ds : ps;
    view.kv_s_per_token =
        poster.wire_s_per_byte * double(prefill.info.layout.shape.token_bytes());
    attempt.order = options_.disagg->decide(view, options_.disagg_options);
    if (attempt.order == DisaggOrder::pull && options_.zero_copy) attempt.order = DisaggOrder::push;
    if (attempt.order == DisaggOrder::local) cached = cached_decode;
  }
  const AttemptId number = ++last_attempt_;
  ++totals_.attempts;
  attempt.uncached = int(tokens.size()) - cached;
  if (attempt.order == DisaggOrder::local) attempt.prefill = attempt.decode;
  if (attempt.order == DisaggOrder::decode_first) {
    attempt.prefill = -1;  // until one takes the job
  } else {
    PlacedLoad& load = members_.at(attempt.prefill).load;
    ++load.queued_requests;
    load.queued_tokens += attempt.uncached;
    attempt.queued = attempt.prompting = true;
  }
  decode.load.sequences += count;
  for (int c = first; c < first + count; ++c) entry.choices[size_t(c)].attempt = number;
  StartRequest message{.attempt = number,
                       .request = entry.request,
                       .state = {.choice = first,
                                 .stands_for = count,
                                 .output = choice.output,
                                 .logits_hash = choice.logits_hash,
                                 .queued_s = request.arrival_s,
                                 .scheduled_s = choice.scheduled_s},
                       .order = attempt.order,
                       .decode = attempt.decode};
  const bool at_decode =
      attempt.order == DisaggOrder::decode_first || attempt.order == DisaggOrder::local;
  const InstanceId to = at_decode ? attempt.decode : attempt.prefill;
  attempts_.emplace(number, attempt);
  post_.send(kConductor, to, std::move(message));
  return true;
}

Status Conductor::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  const long longest = long(request->prompt.size()) + request->max_tokens;
  if (longest > options_.max_model_len)
    return invalid("prompt and max_tokens need " + std::to_string(longest) +
                   " tokens, the context has " + std::to_string(options_.max_model_len));
  std::lock_guard lock(mutex_);
  if (draining_) return Error{ErrorCode::unavailable, "the server is shutting down"};
  if (members_.empty()) return Error{ErrorCode::unavailable, "no instance is there"};
  for (const auto& [id, member] : members_) {
    const InstanceInfo& info = member.info;
    if (request->n > info.max_batch)
      return invalid("n is " + std::to_string(request->n) + ", --max-batch is " +
                     std::to_string(info.max_batch));
    const long blocks = (longest + info.block_tokens - 1) / info.block_tokens;
    if (blocks > info.capacity_blocks)
      return invalid("prompt and max_tokens need " + std::to_string(blocks) +
                     " KV blocks, an instance has " + std::to_string(info.capacity_blocks));
  }
  const uint64_t id = request->id;
  const int n = request->n;
  Entry& entry = requests_[id];
  entry.request = std::move(request);
  entry.sink = std::move(sink);
  entry.choices.resize(size_t(n));
  entry.left = n;
  std::string refused = "no instance is there to take the request";
  if (start(id, 0, n)) {
    const Attempt& attempt = attempts_.at(last_attempt_);
    const InstanceId first = attempt.prefill >= 0 ? attempt.prefill : attempt.decode;
    const Member& member = members_.at(first);
    const bool full = attempt.prefill >= 0 ? member.load.queued_requests > options_.max_queue
                                           : int(jobs_.size()) >= options_.max_queue;
    if (!full) return ok();
    refused = "the queue of " + member.info.name + " is full";
    post_.send(kConductor, first, AbortAttempt{last_attempt_});
    forget(last_attempt_);
  }
  requests_.erase(id);
  return Error{ErrorCode::unavailable, refused};
}

// ---- The global prefill queue (decode_first).

void Conductor::on(InstanceId from, PrefillJob job, Out&) {
  auto found = attempts_.find(job.attempt);
  if (found == attempts_.end() || found->second.decode != from) return;
  if (found->second.order != DisaggOrder::decode_first || std::exchange(found->second.asked, true))
    return;
  jobs_.push_back(std::move(job));
  dispatch_jobs();
}

// A prefill instance takes the next job when it has begun with the one before.
void Conductor::dispatch_jobs() {
  while (!jobs_.empty()) {
    Member* best = nullptr;
    for (auto& [id, member] : members_) {
      if (member.draining || member.info.role != Role::prefill ||
          member.load.queued_requests >= options_.prefill_window)
        continue;
      if (!best || member.load.queued_tokens < best->load.queued_tokens) best = &member;
    }
    if (!best) return;
    PrefillJob job = std::move(jobs_.front());
    jobs_.pop_front();
    auto found = attempts_.find(job.attempt);
    if (found == attempts_.end()) continue;
    Attempt& attempt = found->second;
    attempt.prefill = best->info.id;
    attempt.queued = attempt.prompting = true;
    ++best->load.queued_requests;
    best->load.queued_tokens += attempt.uncached;
    post_.send(kConductor, attempt.prefill, std::move(job));
  }
}

// ---- What instances say.

void Conductor::receive(InstanceId from, Message message) {
  Out out;
  {
    std::lock_guard lock(mutex_);
    if (Member* member = find(from)) {
      member->heard_s = clock_.now();
      std::visit([&](auto& m) { on(from, std::move(m), out); }, message);
    }
  }
  pass_on(out);
}

// Events go to their sinks outside the lock; a request is over when its last one is there.
void Conductor::pass_on(Out& out) {
  const size_t n = out.size();
  for (auto& [sink, event] : out) sink->on_event(std::move(event));
  if (n == 0) return;
  std::lock_guard lock(mutex_);
  passing_ -= int64_t(n);
  if (requests_.empty() && passing_ == 0) idle_.notify_all();
}

void Conductor::emit(Entry& entry, TokenEvent event, Out& out) {
  ++passing_;
  out.emplace_back(entry.sink, std::move(event));
}

void Conductor::on(InstanceId, Report, Out&) {}  // its probe has read it

void Conductor::on(InstanceId from, CacheReport message, Out&) {
  members_.at(from).cache.heard(message);
}

void Conductor::on(InstanceId from, AttemptProgress message, Out&) {
  auto found = attempts_.find(message.attempt);
  if (found == attempts_.end() || found->second.prefill != from) return;
  Attempt& attempt = found->second;
  PlacedLoad& load = members_.at(from).load;
  if (message.stage == AttemptProgress::prompt_done) {
    uncharge_prompt(attempt);
  } else if (std::exchange(attempt.queued, false)) {
    --load.queued_requests;
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
  if (choice.ended || message.index < int(choice.output.size()) ||
      message.index > entry.request->max_tokens)
    return;
  if (message.index > int(choice.output.size())) {  // it has overtaken the other instance's
    choice.early.emplace(message.index, std::move(message.event));
    return;
  }
  choice.latest = from;
  take(entry, choice, std::move(message.event), out);
  while (!choice.ended && !choice.early.empty() &&
         choice.early.begin()->first == int(choice.output.size())) {
    choice.latest = attempt.decode;  // what overtakes comes from the second of the two
    take(entry, choice, std::move(choice.early.extract(choice.early.begin()).mapped()), out);
  }
  if (!choice.ended) return;
  if (--attempt.left == 0) forget(message.attempt);
  forget_choice(request, entry);
}

void Conductor::take(Entry& entry, Choice& choice, TokenEvent event, Out& out) {
  if (event.token >= 0) {
    choice.output.push_back(event.token);
    choice.logits_hash = event.logits_hash;
  }
  // A choice that was placed anew tells of its first time.
  if (choice.cached_tokens < 0) {
    choice.cached_tokens = event.cached_tokens;
    choice.scheduled_s = event.scheduled_s;
  }
  event.cached_tokens = choice.cached_tokens;
  event.scheduled_s = choice.scheduled_s;
  if (event.finish == FinishReason::stop || event.finish == FinishReason::length)
    logits_hash_ += event.logits_hash;
  if (event.finish != FinishReason::none) {
    choice.ended = true;
    --entry.left;
  }
  emit(entry, std::move(event), out);
}

void Conductor::end_choice(Entry& entry, int at, FinishReason reason, const std::string& error,
                           Out& out) {
  Choice& choice = entry.choices[size_t(at)];
  TokenEvent event;
  event.request_id = entry.request->id;
  event.choice = at;
  event.finish = reason;
  event.error = error;
  event.logits_hash = choice.logits_hash;
  event.cached_tokens = std::max(0, choice.cached_tokens);
  event.queued_s = entry.request->arrival_s;
  event.scheduled_s = choice.scheduled_s;
  event.time_s = clock_.now();
  choice.ended = true;
  --entry.left;
  emit(entry, std::move(event), out);
}

void Conductor::forget_choice(uint64_t request, Entry& entry) {
  if (entry.left > 0) return;
  requests_.erase(request);
}

// ---- Attempts end.

// Nothing more can come of the prefill instance: what it put out is here, and what it knew is on
// the other one.
bool Conductor::handed_over(const Attempt& attempt) const {
  const Entry& entry = requests_.at(attempt.request);
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c) {
    const Choice& choice = entry.choices[size_t(c)];
    if (!choice.ended && choice.latest != attempt.decode) return false;
  }
  return true;
}

void Conductor::uncharge_prompt(Attempt& attempt) {
  if (!std::exchange(attempt.prompting, false)) return;
  if (Member* member = find(attempt.prefill)) member->load.queued_tokens -= attempt.uncached;
}

void Conductor::forget(AttemptId number) {
  auto found = attempts_.find(number);
  Attempt& attempt = found->second;
  uncharge_prompt(attempt);
  bool freed = false;
  if (Member* member = find(attempt.prefill)) {
    freed = attempt.queued;
    member->load.queued_requests -= int(attempt.queued);
  }
  if (Member* member = find(attempt.decode)) member->load.sequences -= attempt.count;
  attempts_.erase(found);
  if (freed) dispatch_jobs();
}

void Conductor::on(InstanceId from, AttemptFailed message, Out& out) {
  auto found = attempts_.find(message.attempt);
  if (found == attempts_.end()) return;
  const Attempt& attempt = found->second;
  if (from != attempt.prefill && from != attempt.decode) return;  // not its to say
  if (from == attempt.prefill && from != attempt.decode && handed_over(attempt)) return;
  fail(message.attempt, message.why, out);
}

// What is left of the attempt starts anew: all choices together where they have not begun, else one
// by one.
void Conductor::fail(AttemptId number, const std::string& why, Out& out) {
  const Attempt attempt = attempts_.at(number);
  forget(number);
  ++totals_.failed_attempts;
  for (InstanceId id : {attempt.prefill, attempt.decode})
    if (find(id)) post_.send(kConductor, id, AbortAttempt{number});
  std::erase_if(jobs_, [number](const PrefillJob& job) { return job.attempt == number; });
  Entry& entry = requests_.at(attempt.request);
  const bool late =
      entry.request->deadline_s > 0 && clock_.now() > entry.request->deadline_s;
  const bool hopeless = ++entry.tries > options_.max_tries * int(entry.choices.size());
  bool begun = false;
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c) {
    Choice& choice = entry.choices[size_t(c)];
    begun |= choice.ended || !choice.output.empty();
    choice.early.clear();
    choice.latest = -1;
    choice.attempt = 0;
    if (choice.ended) continue;
    ++totals_.replaced_choices;
    if (entry.aborted) {
      end_choice(entry, c, FinishReason::abort, "", out);
    } else if (late) {
      end_choice(entry, c, FinishReason::timeout, "", out);
    } else if (hopeless) {
      end_choice(entry, c, FinishReason::error, "given up after many attempts: " + why, out);
    }
  }
  if (entry.left == 0) return forget_choice(attempt.request, entry);
  const double now = clock_.now();
  const double later =
      now + (entry.tries < 3 ? 0 : 0.01 * double(1 << std::min(entry.tries - 3, 6)));
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
  for (const Parked& p : parked) {
    Entry& entry = requests_.at(p.request);
    const double deadline = entry.request->deadline_s;
    const bool late = deadline > 0 && now > deadline;
    const bool waited = now > p.since_s + options_.patience_s;
    if (!entry.aborted && !late && now >= p.not_before_s && start(p.request, p.first, p.count))
      continue;
    if (!entry.aborted && !late && !waited) {
      parked_.push_back(p);
      continue;
    }
    for (int c = p.first; c < p.first + p.count; ++c)
      end_choice(entry, c,
                 entry.aborted ? FinishReason::abort
                 : late        ? FinishReason::timeout
                               : FinishReason::error,
                 entry.aborted || late ? "" : "no instance came to take its place", out);
    forget_choice(p.request, entry);
  }
}

void Conductor::abort(uint64_t request_id) {
  Out out;
  {
    std::lock_guard lock(mutex_);
    auto found = requests_.find(request_id);
    if (found == requests_.end()) return;
    found->second.aborted = true;
    AttemptId last = 0;
    for (const Choice& choice : found->second.choices) {
      if (choice.ended || choice.attempt == 0 || choice.attempt == last) continue;
      last = choice.attempt;
      const Attempt& attempt = attempts_.at(last);
      for (InstanceId id : {attempt.prefill, attempt.decode})
        if (find(id)) post_.send(kConductor, id, AbortAttempt{last});
      std::erase_if(jobs_, [last](const PrefillJob& job) { return job.attempt == last; });
    }
    retry_parked(out);
  }
  pass_on(out);
}

// ---- As a whole.

ServiceStats Conductor::stats() const {
  std::lock_guard lock(mutex_);
  ServiceStats all;
  all.shared_pool = shared_pool_;
  all.conductor = totals_;
  for (const auto& [id, member] : members_) all.instances.push_back(member.probe->stats());
  return all;
}

// A turn is as long as its step; a very long prompt on a slow machine stays well below this.
bool Conductor::healthy() const {
  constexpr double kSilence = 60;  // seconds
  std::lock_guard lock(mutex_);
  const double now = clock_.now();
  return !members_.empty() &&
         std::all_of(members_.begin(), members_.end(), [&](const auto& entry) {
           return now - entry.second.probe->stats().heartbeat_s < kSilence;
         });
}

void Conductor::drain() {
  std::lock_guard lock(mutex_);
  draining_ = true;
}

bool Conductor::wait_idle(double seconds) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, std::chrono::duration<double>(seconds),
                        [&] { return requests_.empty() && passing_ == 0; });
}

void Conductor::end_all(const std::string& why) {
  Out out;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, entry] : requests_)
      for (int c = 0; c < int(entry.choices.size()); ++c)
        if (!entry.choices[size_t(c)].ended) end_choice(entry, c, FinishReason::abort, why, out);
    requests_.clear();
    attempts_.clear();
    parked_.clear();
    jobs_.clear();
  }
  pass_on(out);
}

uint64_t Conductor::logits_hash() const {
  std::lock_guard lock(mutex_);
  return logits_hash_;
}

PlacedLoad Conductor::load(InstanceId id) const {
  std::lock_guard lock(mutex_);
  auto found = members_.find(id);
  return found == members_.end() ? PlacedLoad{} : found->second.load;
}

size_t Conductor::known_blocks(InstanceId id) const {
  std::lock_guard lock(mutex_);
  auto found = members_.find(id);
  return found == members_.end() ? 0 : found->second.cache.blocks();
}

ConductorStats Conductor::totals() const {
  std::lock_guard lock(mutex_);
  return totals_;
}

std::vector<InstanceInfo> Conductor::members() const {
  std::lock_guard lock(mutex_);
  std::vector<InstanceInfo> all;
  for (const auto& [id, member] : members_) all.push_back(member.info);
  return all;
}

}  // namespace xpyd
