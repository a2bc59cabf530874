// A registry keeps the cluster's membership outside the cluster: names with values. A name stays as long as the process
// that announced it is alive. Without a registry the conductor's table is the membership, and workers are told its
// address. With one (server/workers/etcd_registry.cc) a conductor may die and start again elsewhere, and workers find
// it.
//
// A registry that cannot be reached changes nothing: the last values stay valid. Channels decide whether a peer is
// alive.
//
// Thread safety: any thread. Callbacks run on the registry's thread, one at a time, and must not block.
#pragma once

#include <functional>
#include <set>
#include <string>

namespace xpyd::disagg {

inline constexpr const char* kConductorName = "conductor";  // its value is a NamedConductor

// The conductor that holds the name: its address, and the id that it proves in the hello of each channel (net/hello.h).
// The address alone is not enough. A conductor that restarts at the same address finds its predecessor's entry there
// until that lease ends.
struct NamedConductor {
  std::string address;  // "": nobody holds the name
  std::string id;       // without blanks; "": unknown, and no conductor matches it

  std::string value() const { return address + " " + id; }
  static NamedConductor of(const std::string& value) {
    const size_t blank = value.rfind(' ');
    return blank == std::string::npos ? NamedConductor{value, ""}
                                      : NamedConductor{value.substr(0, blank), value.substr(blank + 1)};
  }
};

struct RegistryState {
  std::string trouble;         // the last error, or a name that another process holds; "": none
  std::set<std::string> held;  // names of this process, as the registry last reported
};

class Registry {
 public:
  virtual ~Registry() = default;  // withdraws the names, if the registry can be reached

  // Holds `name` for this process, soon. If another process holds it, waits until that one's lease ends. A second call
  // changes the value. Several processes that announce one name thus hold an election; state().held shows the winner.
  virtual void announce(const std::string& name, const std::string& value) = 0;
  virtual void withdraw(const std::string& name) = 0;

  // Calls `on_change` within about a second of each change of the name's value. It is "" while nobody holds the name,
  // and that is the value before the first call. Changes close together may be merged.
  virtual void watch(const std::string& name, std::function<void(const std::string& value)> on_change) = 0;

  virtual RegistryState state() const = 0;
};

}  // namespace xpyd::disagg
