#include "disagg/handover/leases.h"

#include <algorithm>
#include <optional>

namespace xpyd::disagg::handover {
namespace {

// Returns the attempt of a message whose sender holds a lease while it waits for the answer.
std::optional<AttemptId> asked(const Message& message) {
  if (const auto* reserve = std::get_if<ReserveKv>(&message)) return reserve->attempt;
  if (const auto* offered = std::get_if<KvOffered>(&message)) return offered->attempt;
  return {};
}

}  // namespace

void Leases::put(Envelope envelope) {
  if (lease_s_ == 0) return mailbox_.send(std::move(envelope));
  std::lock_guard lock(mutex_);
  if (const auto attempt = asked(envelope.message)) unread_.emplace_back(envelope.from, *attempt);
  mailbox_.send(std::move(envelope));
}

std::vector<Envelope>& Leases::take() {
  std::lock_guard lock(mutex_);
  mailbox_.take(inbox_);
  unread_.clear();
  return inbox_;
}

std::vector<std::pair<InstanceId, KvReserved>> Leases::take_reserved() {
  std::vector<std::pair<InstanceId, KvReserved>> taken;
  const auto known = std::ptrdiff_t(inbox_.size());
  mailbox_.take(inbox_);
  const auto rest = std::remove_if(inbox_.begin() + known, inbox_.end(), [&](Envelope& envelope) {
    auto* reserved = std::get_if<KvReserved>(&envelope.message);
    if (reserved) taken.emplace_back(envelope.from, std::move(*reserved));
    return reserved != nullptr;
  });
  inbox_.erase(rest, inbox_.end());
  return taken;
}

void Leases::update(SharedAttempts of_peer) {
  for (const Envelope& envelope : inbox_)
    if (const auto attempt = asked(envelope.message)) of_peer[envelope.from].push_back(*attempt);
  std::lock_guard lock(mutex_);
  shared_ = std::move(of_peer);
  updated_s_ = clock_.now();
}

void Leases::add(InstanceId peer, AttemptId attempt) {
  if (lease_s_ == 0) return;
  std::lock_guard lock(mutex_);
  shared_[peer].push_back(attempt);
  updated_s_ = clock_.now();
}

bool Leases::renew(SharedAttempts& of_peer) {
  std::lock_guard lock(mutex_);
  const double now = clock_.now();
  if (lease_s_ == 0 || now < renewed_s_ + lease_s_ / 4 || now > updated_s_ + kLongestTurnSeconds) return false;
  renewed_s_ = now;
  of_peer = shared_;
  for (const auto& [peer, attempt] : unread_) of_peer[peer].push_back(attempt);
  return true;
}

}  // namespace xpyd::disagg::handover
