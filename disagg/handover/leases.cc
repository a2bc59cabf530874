#include "disagg/handover/leases.h"

#include <optional>

#include "disagg/messages.h"

namespace xpyd::disagg::handover {
namespace {

// A peer that has sent it waits, with a lease, for an answer.
std::optional<AttemptId> asked(const Message& message) {
  if (const auto* reserve = std::get_if<ReserveKv>(&message)) return reserve->attempt;
  if (const auto* offered = std::get_if<KvOffered>(&message)) return offered->attempt;
  return {};
}

}  // namespace

Leases::Leases(double lease_s, Clock& clock) : lease_s_(lease_s), clock_(clock) {}

Leases::~Leases() = default;

void Leases::put(Envelope envelope) {
  if (lease_s_ == 0) return mail_.send(std::move(envelope));
  std::lock_guard lock(mutex_);
  if (const auto attempt = asked(envelope.message)) unread_.emplace_back(envelope.from, *attempt);
  mail_.send(std::move(envelope));
}

void Leases::take(std::vector<Envelope>& inbox) {
  std::lock_guard lock(mutex_);
  mail_.take(inbox);
  unread_.clear();
}

void Leases::update(Standing of_peer, const std::vector<Envelope>& inbox) {
  for (const Envelope& envelope : inbox)
    if (const auto attempt = asked(envelope.message)) of_peer[envelope.from].push_back(*attempt);
  std::lock_guard lock(mutex_);
  standing_ = std::move(of_peer);
  stood_s_ = clock_.now();
}

bool Leases::renew(Standing& of_peer) {
  std::lock_guard lock(mutex_);
  const double now = clock_.now();
  if (lease_s_ == 0 || now < renewed_s_ + lease_s_ / 4 || now > stood_s_ + kLongestTurnSeconds) return false;
  renewed_s_ = now;
  of_peer = standing_;
  for (const auto& [peer, attempt] : unread_) of_peer[peer].push_back(attempt);
  return true;
}

}  // namespace xpyd::disagg::handover
