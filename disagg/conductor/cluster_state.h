// The cluster as the conductor sees it: its instances, when each one was last heard, and which ones are silent. The
// scoreboard holds what they report, as the numbers that policies read.
//
// Thread safety: none; the conductor locks.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "disagg/conductor/conductor_options.h"
#include "disagg/conductor/scoreboard.h"

namespace xpyd::disagg {

class ClusterState {
 public:
  explicit ClusterState(ConductorContext& context);

  InstanceId new_id() { return ++last_id_; }
  // Adds an instance, and tells it and all others about each other.
  void join(InstanceInfo info, std::shared_ptr<InstanceProbe> probe);
  // Removes an instance and tells the others. Returns false if it is unknown.
  bool leave(InstanceId id);
  // Notes that a message from the instance has just arrived. Returns false if it is unknown.
  bool heard(InstanceId from);
  // Returns the instances that have sent nothing for a lease. Requires: it is called at least every quarter of a lease.
  // If the gap is longer, this process has slept and has messages to read, so that time does not count as silence.
  std::vector<InstanceId> silent();

  const Member* find(InstanceId id) const;
  Member* find(InstanceId id) { return const_cast<Member*>(std::as_const(*this).find(id)); }
  Member& at(InstanceId id) { return members_.at(id); }
  const Member& at(InstanceId id) const { return members_.at(id); }
  std::map<InstanceId, Member>& members() { return members_; }
  const std::map<InstanceId, Member>& members() const { return members_; }
  // See Service::trouble().
  std::string trouble() const;

  Scoreboard& board() { return board_; }
  const Scoreboard& board() const { return board_; }

 private:
  ConductorContext& context_;
  std::map<InstanceId, Member> members_;
  Scoreboard board_;
  double ticked_s_ = 0;  // Clock: last call of silent(); 0: none yet
  InstanceId last_id_ = -1;
};

}  // namespace xpyd::disagg
