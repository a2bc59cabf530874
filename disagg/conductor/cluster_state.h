// The cluster as the conductor sees it: which instances are there, when each was heard of last, and which have fallen
// silent. The scoreboard beside it says what they report, in the numbers that policies read.
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
  // Adds an instance; it and all others are told of each other.
  void join(InstanceInfo info, std::shared_ptr<InstanceProbe> probe);
  // Removes an instance and tells the others. False: it is not there.
  bool leave(InstanceId id);
  // An instance has said something just now. False: it is not there.
  bool heard(InstanceId from);
  // Returns the instances that have said nothing for a lease. Requires: it is called every quarter of a lease, or more
  // often. If it was not, this process has slept: words of that time are still to be read, and no instance counts as
  // silent for it.
  std::vector<InstanceId> silent();

  const Member* find(InstanceId id) const;
  Member* find(InstanceId id) { return const_cast<Member*>(std::as_const(*this).find(id)); }
  Member& at(InstanceId id) { return members_.at(id); }
  const Member& at(InstanceId id) const { return members_.at(id); }
  std::map<InstanceId, Member>& members() { return members_; }
  const std::map<InstanceId, Member>& members() const { return members_; }
  // Service::trouble().
  std::string trouble() const;

  Scoreboard& board() { return board_; }
  const Scoreboard& board() const { return board_; }

 private:
  ConductorContext& context_;
  std::map<InstanceId, Member> members_;
  Scoreboard board_;
  double ticked_s_ = 0;  // Clock: the last silent(); 0: none yet
  InstanceId last_id_ = -1;
};

}  // namespace xpyd::disagg
