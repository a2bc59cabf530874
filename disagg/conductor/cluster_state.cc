#include "disagg/conductor/cluster_state.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {

ClusterState::ClusterState(ConductorContext& context)
    : context_(context),
      board_(context.options.step_tokens, first_cost(context.options.prior), context.options.fetch_s_per_token) {}

void ClusterState::join(InstanceInfo info, std::shared_ptr<InstanceProbe> probe) {
  const InstanceId id = info.id;
  for (auto& [other, member] : members_) {
    context_.bus.send(kConductor, other, PeerJoined{info});
    context_.bus.send(kConductor, id, PeerJoined{member.info});
  }
  Member& member = members_[id];
  member.info = std::move(info);
  member.probe = std::move(probe);
  member.heard_s = context_.clock.now();
  board_.joined(member);
}

bool ClusterState::leave(InstanceId id) {
  const auto gone = members_.find(id);
  if (gone == members_.end()) return false;
  board_.left(gone->second);
  members_.erase(gone);
  ++context_.totals.left;
  for (auto& [other, member] : members_) context_.bus.send(kConductor, other, PeerGone{id});
  return true;
}

bool ClusterState::heard(InstanceId from) {
  Member* member = find(from);
  if (member) member->heard_s = context_.clock.now();
  return member;
}

std::vector<InstanceId> ClusterState::silent() {
  const double now = context_.clock.now(), lease_s = context_.options.lease_s;
  const double slept = now - std::exchange(ticked_s_, now) - lease_s / 4;
  if (slept > 0)
    for (auto& [id, member] : members_) member.heard_s = std::min(now, member.heard_s + slept);
  std::vector<InstanceId> silent;
  if (lease_s > 0)
    for (const auto& [id, member] : members_)
      if (now > member.heard_s + lease_s) silent.push_back(id);
  return silent;
}

const Member* ClusterState::find(InstanceId id) const {
  const auto found = members_.find(id);
  return found == members_.end() ? nullptr : &found->second;
}

std::string ClusterState::trouble() const {
  const double now = context_.clock.now();
  bool prefill = false, decode = false;
  for (const auto& [id, member] : members_) {
    if (now - member.probe->stats().heartbeat_s >= kLongestTurnSeconds)
      return member.info.name + " has not completed a loop for " + std::to_string(int(kLongestTurnSeconds)) + " s";
    prefill |= !member.draining && member.info.role != Role::decode;
    decode |= !member.draining && member.info.role != Role::prefill;
  }
  if (prefill && decode) return "";
  const char* missing = prefill ? "decode" : decode ? "prefill" : "prefill and decode";
  return std::string("there is no instance for ") + missing;
}

}  // namespace xpyd::disagg
