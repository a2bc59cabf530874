// An instance's wire to its peers: who they are, and which of them it is not connected to yet. It calls a peer as soon
// as it hears of it, and again and again while the peer cannot be reached. Only messages of the first call wait.
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

  void handle(InstanceId from, PeerJoined message);
  // Goes on connecting, without waiting for anybody. True: a wire has been connected, or cannot be.
  bool connect();
  // True: the message comes from a peer that is being called for the first time, or is work that is placed on it. It is
  // of use when the peer can be reached, and is given up when it cannot. A client that has left or has no more time
  // does not wait for that.
  bool waits(const Envelope& envelope, const Attempts& attempts) const;
  void disconnect(InstanceId peer);
  void forget(InstanceId peer);  // once the other parts know that it is gone
  // The time until a peer is called again, or `seconds`, whichever is less.
  double nap(double seconds) const;
  std::string name_of(InstanceId id) const;

 private:
  // A peer that the wire is not connected to yet.
  struct Pending {
    InstanceInfo info;
    bool calling = true;  // for the first time; false: it could not be reached
    double since_s = 0;   // Clock: this try
    double again_s = 0;   // Clock: not asked before
  };

  const InstanceOptions& options_;
  InstanceParts& parts_;
  std::map<InstanceId, Pending> pending_;
  std::map<InstanceId, std::string> names_;
};

}  // namespace xpyd::disagg
