#include "disagg/conductor/conductor.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace xpyd::disagg {

Conductor::Conductor(ConductorOptions options, Clock& clock, Post& post)
    : options_(options),
      clock_(clock),
      post_(post),
      random_(options.seed),
      board_(options.step_tokens, first_cost(options.prior), options.fetch_s_per_token, options.prior.has_value()) {}

Conductor::~Conductor() = default;

// ---- Instances come and go.

InstanceId Conductor::new_id() {
  std::lock_guard lock(mutex_);
  return ++last_id_;
}

void Conductor::joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe) {
  act([&](Out& out) {
    const InstanceId id = info.id;
    for (auto& [other, member] : members_) {
      post_.send(kConductor, other, PeerJoined{info});
      post_.send(kConductor, id, PeerJoined{member.info});
    }
    Member& member = members_[id];
    member.info = std::move(info);
    member.probe = std::move(probe);
    member.heard_s = clock_.now();
    board_.joined(member);
    ++totals_.joined;
    retry_parked(out);
    dispatch_jobs();
  });
}

void Conductor::left(InstanceId id, const std::string& why, AttemptFailure reason) {
  act([&](Out& out) { remove(id, reason, why, out); });
}

// Its attempts are placed anew, but for those that it has handed over.
void Conductor::remove(InstanceId id, AttemptFailure reason, const std::string& why, Out& out) {
  const auto gone = members_.find(id);
  if (gone == members_.end()) return;
  board_.left(gone->second);
  members_.erase(gone);
  ++totals_.left;
  for (auto& [other, member] : members_) post_.send(kConductor, other, PeerGone{id});
  std::vector<AttemptId> hit;
  for (const auto& [attempt, a] : attempts_)
    if (a.decode == id || (a.prefill == id && !handed_over(a))) hit.push_back(attempt);
  std::sort(hit.begin(), hit.end());  // the same order on every machine
  if (reason == AttemptFailure::instance_gone) blame(id, hit);
  for (AttemptId attempt : hit) fail(attempt, reason, why, out);
  retry_parked(out);
}

void Conductor::drain(InstanceId id, bool on) {
  std::lock_guard lock(mutex_);
  if (Member* member = find(id)) board_.drain(*member, on);
}

bool Conductor::idle(InstanceId id) const {
  std::lock_guard lock(mutex_);
  return std::none_of(attempts_.begin(), attempts_.end(),
                      [id](const auto& entry) { return entry.second.prefill == id || entry.second.decode == id; });
}

Member* Conductor::find(InstanceId id) {
  auto found = members_.find(id);
  return found == members_.end() ? nullptr : &found->second;
}

void Conductor::tick() {
  act([&](Out& out) {
    const double now = clock_.now();
    // If it was this process that slept, what was said meanwhile is still to be read.
    const double slept = now - std::exchange(ticked_s_, now) - options_.lease_s / 4;
    if (slept > 0)
      for (auto& [id, member] : members_) member.heard_s = std::min(now, member.heard_s + slept);
    std::vector<InstanceId> silent;
    if (options_.lease_s > 0)
      for (const auto& [id, member] : members_)
        if (now > member.heard_s + options_.lease_s) silent.push_back(id);
    for (InstanceId id : silent) remove(id, AttemptFailure::instance_silent, "an instance fell silent", out);
    retry_parked(out);
  });
}

// ---- What instances say.

void Conductor::receive(InstanceId from, Message message) {
  act([&](Out& out) {
    if (Member* member = find(from)) {
      member->heard_s = clock_.now();
      std::visit([&](auto& m) { on(from, std::move(m), out); }, message);
    }
  });
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
  out.push_back({entry.sink, std::move(event)});
}

void Conductor::on(InstanceId, Report, Out&) {}  // its probe has read it

void Conductor::on(InstanceId from, CacheReport message, Out&) { board_.heard(members_.at(from), message); }

// ---- As a whole.

ServiceStats Conductor::stats() const {
  std::lock_guard lock(mutex_);
  ServiceStats all;
  all.shared_pool = shared_pool_;
  all.conductor = totals_;
  all.conductor.prefill_jobs = int(jobs_.size());
  for (const auto& [id, member] : members_) all.instances.push_back(member.probe->stats());
  return all;
}

ServicePicture Conductor::picture() const {
  constexpr size_t kMostRunning = 16;
  std::lock_guard lock(mutex_);
  ServicePicture all;
  all.t = clock_.now();
  for (const auto& [id, member] : members_)
    if (auto map = member.probe->block_map()) all.maps[member.info.name] = std::move(map);
  for (const auto& [id, entry] : requests_) {
    if (all.lives.size() == kMostRunning) break;
    all.lives.push_back(life_of(entry));
  }
  all.lives.insert(all.lives.end(), ended_.begin(), ended_.end());
  return all;
}

std::string Conductor::trouble() const {
  std::lock_guard lock(mutex_);
  const double now = clock_.now();
  bool prefill = false, decode = false;
  for (const auto& [id, member] : members_) {
    if (now - member.probe->stats().heartbeat_s >= kLongestTurnSeconds)
      return member.info.name + " has not turned its loop for " + std::to_string(int(kLongestTurnSeconds)) + " s";
    prefill |= !member.draining && member.info.role != Role::decode;
    decode |= !member.draining && member.info.role != Role::prefill;
  }
  if (prefill && decode) return "";
  const char* missing = prefill ? "decode" : decode ? "prefill" : "prefill and decode";
  return std::string("no instance is there for ") + missing;
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
  act([&](Out& out) {
    for (auto& [id, entry] : requests_)
      for (int c = 0; c < int(entry.choices.size()); ++c)
        if (!entry.choices[size_t(c)].ended) end_choice(entry, c, FinishReason::abort, why, out);
    requests_.clear();
    queued_bytes_ = 0;
    attempts_.clear();
    for (auto& [id, member] : members_) member.decoding.clear();
    parked_.clear();
    jobs_.clear();
  });
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
  return found == members_.end() ? 0 : board_.known_blocks(found->second);
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

}  // namespace xpyd::disagg
