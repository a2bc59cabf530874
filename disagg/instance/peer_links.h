// The connections of an instance's transport to its peers. It calls a peer as soon as it joins, again while it cannot
// be reached, and anew when the connection has broken. Messages wait for the first call of a peer only.
//
// Thread safety: the instance's thread.
#pragma once

#include <map>
#include <string>

#include "disagg/handover/attempts.h"
#include "disagg/instance/instance_options.h"

namespace xpyd::disagg {

class PeerLinks {
 public:
  PeerLinks(const InstanceOptions& options, InstanceParts& parts) : options_(options), parts_(parts) {}

  void handle(InstanceId from, PeerJoined message);  // begins the first call of a peer
  // Continues connecting, without blocking. Returns true if a connection was made or a call failed.
  bool connect();
  // Returns whether the message must wait: it comes from a peer whose first call is under way, or it is work to be
  // shared with one. It is handled when the peer is reached or the call fails. Work whose client has left or whose
  // deadline is over does not wait.
  bool waits(const Envelope& envelope, const Attempts& attempts) const;
  void disconnect(InstanceId peer);
  void forget(InstanceId peer);  // requires: the other parts know that it is gone
  // Returns the time until a peer is called again, at most `seconds`.
  double nap(double seconds) const;
  std::string name_of(InstanceId id) const;

 private:
  void look(double now);
  // A peer that the transport is not connected to yet.
  struct Pending {
    InstanceInfo info;
    bool calling = true;  // first call; false: it has failed, or the connection has broken
    double since_s = 0;   // Clock: begin of this call
    double again_s = 0;   // Clock: not polled before
  };
  struct Connected {
    InstanceInfo info;
    double since_s = 0;  // Clock
  };

  const InstanceOptions& options_;
  InstanceParts& parts_;
  std::map<InstanceId, Pending> pending_;
  std::map<InstanceId, Connected> connected_;
  double look_s_ = 0;  // Clock: when it looks next whether connections have broken
  std::map<InstanceId, std::string> names_;
};

}  // namespace xpyd::disagg
