#include "disagg/instance/peer_links.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace xpyd::disagg {
namespace {

constexpr double kAgainSeconds = 0.25, kLookSeconds = 0.1;

}  // namespace

void PeerLinks::handle(InstanceId, PeerJoined message) {
  if (message.info.id == options_.id) return;
  const InstanceId id = message.info.id;
  names_[id] = message.info.name;
  pending_[id] = {.info = std::move(message.info), .since_s = parts_.clock.now()};
}

// One call decides about all waiting messages at the same moment, so none overtakes another.
bool PeerLinks::connect() {
  const double now = parts_.clock.now();
  bool moved = false;
  if (now >= look_s_) {
    look_s_ = now + kLookSeconds;
    look(now);
  }
  for (auto at = pending_.begin(); at != pending_.end();) {
    Pending& peer = at->second;
    const InstanceInfo& info = peer.info;
    const InstanceId id = info.id;
    const auto next = std::next(at);
    if (now >= peer.again_s) {
      const Result<bool> connected = parts_.transport.connect(info.id, info.address);
      if (!connected) {  // until it succeeds, attempts that both share are placed anew or computed at D
        if (std::exchange(peer.calling, false))
          log_line(LogLevel::warning, "xpyd: %s cannot reach %s: %s", options_.name.c_str(), info.name.c_str(),
                   connected.error().message.c_str());
        peer.again_s = now + std::max(kAgainSeconds, now - peer.since_s);
        peer.since_s = peer.again_s;
        moved = true;
      } else if (connected.value()) {
        parts_.peers.add(info.id, info.layout, info.shards);
        connected_.insert_or_assign(id, Connected{std::move(peer.info), now});
        pending_.erase(at);
        moved = true;
      }
    }
    at = next;
  }
  return moved;
}

// A call of a connected peer only asks whether it is connected. If the connection has broken, the call begins anew: at
// once, but not for a connection that has just been made.
void PeerLinks::look(double now) {
  for (auto at = connected_.begin(); at != connected_.end();) {
    const auto next = std::next(at);
    auto& [id, peer] = *at;
    const Result<bool> still = parts_.transport.connect(id, peer.info.address);
    if (!still || !still.value()) {
      log_line(LogLevel::warning, "xpyd: %s has lost its transport's connection to %s and connects again",
               options_.name.c_str(), peer.info.name.c_str());
      pending_[id] = {.info = std::move(peer.info),
                      .calling = false,
                      .since_s = now,
                      .again_s = std::max(now, peer.since_s + kAgainSeconds)};
      connected_.erase(at);
    }
    at = next;
  }
}

bool PeerLinks::waits(const Envelope& envelope, const Attempts& attempts) const {
  InstanceId peer = envelope.from;
  const auto placed = [&](const auto* work) {
    if (!work) return;
    const double until = work->request->deadline_s;
    const bool over = attempts.aborted(work->attempt) || (until > 0 && parts_.clock.now() > until);
    peer = over ? kConductor : work->decode;
  };
  placed(std::get_if<StartRequest>(&envelope.message));
  placed(std::get_if<PrefillJob>(&envelope.message));
  const auto found = pending_.find(peer);
  return found != pending_.end() && found->second.calling;
}

void PeerLinks::disconnect(InstanceId peer) {
  parts_.transport.disconnect(peer);
  pending_.erase(peer);
  connected_.erase(peer);
}

void PeerLinks::forget(InstanceId peer) {
  names_.erase(peer);
  parts_.peers.erase(peer);
}

double PeerLinks::nap(double seconds) const {
  for (const auto& [id, peer] : pending_)
    seconds = std::min(seconds, std::max(0.001, peer.again_s - parts_.clock.now()));
  return seconds;
}

std::string PeerLinks::name_of(InstanceId id) const {
  const auto known = names_.find(id);
  return id == options_.id ? options_.name : known == names_.end() ? "i" + std::to_string(id) : known->second;
}

}  // namespace xpyd::disagg
