#include "disagg/instance/peer_links.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace xpyd::disagg {

void PeerLinks::handle(InstanceId, PeerJoined message) {
  if (message.info.id == options_.id) return;
  const InstanceId id = message.info.id;
  connected_.erase(id);
  names_[id] = message.info.name;
  pending_[id] = {.info = std::move(message.info), .since_s = parts_.clock.now()};
}

// One call decides about all waiting messages at the same moment, so none overtakes another.
bool PeerLinks::connect() {
  constexpr double kAgainSeconds = 0.25;
  const double now = parts_.clock.now();
  bool moved = false;
  // A call of a connected peer only looks. If the connection has broken, it begins anew.
  for (auto at = connected_.begin(); at != connected_.end();) {
    const auto next = std::next(at);
    const Result<bool> still = parts_.transport.connect(at->first, at->second.address);
    if (!still || !still.value()) {
      pending_[at->first] = {.info = std::move(at->second), .since_s = now};
      connected_.erase(at);
    }
    at = next;
  }
  for (auto at = pending_.begin(); at != pending_.end();) {
    Pending& peer = at->second;
    const InstanceInfo& info = peer.info;
    const InstanceId id = info.id;
    const auto next = std::next(at);
    if (now >= peer.again_s) {
      const Result<bool> connected = parts_.transport.connect(info.id, info.address);
      if (!connected) {  // until it succeeds, attempts that both share are placed anew
        if (std::exchange(peer.calling, false))
          log_line(LogLevel::warning, "xpyd: %s cannot reach %s: %s", options_.name.c_str(), info.name.c_str(),
                   connected.error().message.c_str());
        peer.again_s = now + std::max(kAgainSeconds, now - peer.since_s);
        peer.since_s = peer.again_s;
        moved = true;
      } else if (connected.value()) {
        if (Status known = parts_.peers.add(info.id, info.layout, info.shards);
            !known)  // the layout comes from another process
          log_line(LogLevel::warning, "xpyd: %s and %s cannot exchange KV: %s", options_.name.c_str(),
                   info.name.c_str(), known.error().message.c_str());
        connected_.insert_or_assign(id, std::move(peer.info));
        pending_.erase(at);
        moved = true;
      }
    }
    at = next;
  }
  return moved;
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

void PeerLinks::lost(InstanceId peer) {
  parts_.peers.erase(peer);
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
