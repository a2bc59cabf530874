#include "disagg/conductor/attempt_table.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {

// ---- Charges.

AttemptId AttemptTable::add(const Attempt& attempt) {
  const AttemptId number = ++last_;
  ++context_.totals.attempts;
  Attempt& added = attempts_.emplace(number, attempt).first->second;
  if (added.prefill >= 0) charge_prompt(added, cluster_.at(added.prefill));
  Member& decode = cluster_.at(added.decode);
  cluster_.board().decodes(decode, added.count, added.context);
  decode.decoding.insert(number);
  return number;
}

void AttemptTable::charge_prompt(Attempt& attempt, Member& prefill) {
  attempt.prefill = prefill.info.id;
  attempt.queued = attempt.prompting = true;
  requests_.at(attempt.request).trace.prefill = prefill.info.name;
  cluster_.board().placed(prefill, attempt.prompt, context_.clock.now());
}

bool AttemptTable::begin_prompt(Attempt& attempt) {
  if (!std::exchange(attempt.queued, false)) return false;
  cluster_.board().begun(cluster_.at(attempt.prefill), attempt.prompt, context_.clock.now());
  dispatch();
  return true;
}

void AttemptTable::uncharge_prompt(Attempt& attempt) {
  if (!std::exchange(attempt.prompting, false)) return;
  if (Member* member = cluster_.find(attempt.prefill))
    cluster_.board().done(*member, attempt.prompt, context_.clock.now());
}

void AttemptTable::generated(Attempt& attempt) {
  ++attempt.context;
  if (Member* member = cluster_.find(attempt.decode)) cluster_.board().decodes(*member, 0, 1);
}

void AttemptTable::forget(AttemptId number) {
  const double now = context_.clock.now();
  auto found = attempts_.find(number);
  Attempt& attempt = found->second;
  const bool freed = attempt.queued && cluster_.find(attempt.prefill);
  if (freed) cluster_.board().begun(cluster_.at(attempt.prefill), attempt.prompt, now);
  uncharge_prompt(attempt);
  if (Member* member = cluster_.find(attempt.decode)) {
    cluster_.board().decodes(*member, -attempt.count, -attempt.context);
    member->decoding.erase(number);
    if (attempt.left == 0 && !attempt.prompting) {
      constexpr double kNew = 1.0 / 32;  // weight of the newest one
      const double lasted_s = now - attempt.joins_s;
      member->decode_s += (member->decode_s == 0 ? 1 : kNew) * (lasted_s - member->decode_s);
    }
  }
  attempts_.erase(found);
  if (freed) dispatch();
}

void AttemptTable::clear() {
  attempts_.clear();
  jobs_.clear();
  for (auto& [id, member] : cluster_.members()) member.decoding.clear();
}

Attempt* AttemptTable::find(AttemptId number) {
  const auto found = attempts_.find(number);
  return found == attempts_.end() ? nullptr : &found->second;
}

bool AttemptTable::idle(InstanceId id) const {
  return std::ranges::none_of(attempts_,
                              [id](const auto& a) { return a.second.prefill == id || a.second.decode == id; });
}

// ---- The global prefill queue.

void AttemptTable::add_job(PrefillJob job) {
  jobs_.push_back(std::move(job));
  dispatch();
}

void AttemptTable::drop_job(AttemptId attempt) {
  std::erase_if(jobs_, [attempt](const PrefillJob& job) { return job.attempt == attempt; });
}

void AttemptTable::dispatch() {
  while (!jobs_.empty()) {
    Member* best = nullptr;
    for (auto& [id, member] : cluster_.members()) {
      if (member.draining || member.info.role != Role::prefill || member.load.queued_requests > 0) continue;
      if (!best || member.load.queued_tokens < best->load.queued_tokens) best = &member;
    }
    if (!best) return;
    PrefillJob job = std::move(jobs_.front());
    jobs_.pop_front();
    Attempt* const attempt = find(job.attempt);
    if (!attempt) continue;
    charge_prompt(*attempt, *best);
    context_.bus.send(kConductor, attempt->prefill, std::move(job));
  }
}

// ---- Instances end.

bool AttemptTable::handed_over(const Attempt& attempt) const {
  const RequestTable::Entry& entry = requests_.at(attempt.request);
  for (int c = attempt.first; c < attempt.first + attempt.count; ++c) {
    const RequestTable::Choice& choice = entry.choices[size_t(c)];
    if (!choice.ended && choice.latest != attempt.decode) return false;
  }
  return true;
}

std::vector<AttemptId> AttemptTable::hit_by_end_of(InstanceId id) const {
  std::vector<AttemptId> hit;
  for (const auto& [number, a] : attempts_)
    if (a.decode == id || (a.prefill == id && !handed_over(a))) hit.push_back(number);
  std::ranges::sort(hit);
  return hit;
}

}  // namespace xpyd::disagg
