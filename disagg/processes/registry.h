// A registry keeps the cluster's membership outside of it: names with values, each for as long as the process that
// announced it lives. Without one the conductor's own table is the membership, and workers must be told its address;
// with one (server/workers/etcd_registry.cc) a conductor may die, start again elsewhere, and be found by its workers.
//
// A registry that cannot be reached changes nothing: what was there is taken as being there still.
// Whether a peer is alive is for its channel to say.
//
// Thread safety: any thread. Callbacks run on the registry's thread, one at a time; they must not block.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

namespace xpyd::disagg {

inline constexpr const char* kConductorName = "conductor";  // its value: a NamedConductor

// Where the conductor is that holds the name, and which one it is: the id that it proves in the hello of each channel
// (net/hello.h). The address alone does not say it: a conductor that died and was started again at its address finds
// its predecessor's entry there until that lease ends.
struct NamedConductor {
  std::string address;  // "": nobody holds the name
  std::string id;       // without blanks; "": not said, and then nobody is that one

  std::string value() const { return address + " " + id; }
  static NamedConductor of(const std::string& value) {
    const size_t blank = value.rfind(' ');
    return blank == std::string::npos ? NamedConductor{value, ""}
                                      : NamedConductor{value.substr(0, blank), value.substr(blank + 1)};
  }
};

struct RegistryState {
  bool reachable = false;
  int64_t outages = 0;         // times that it was lost
  int64_t lost_leases = 0;     // times that it had forgotten us, and was told again
  std::string trouble;         // the last error, or a name that somebody else holds
  std::set<std::string> held;  // names that are this process's, by what the registry last said
};

class Registry {
 public:
  virtual ~Registry() = default;  // withdraws what is announced, if the registry can be reached

  // Holds `name` for this process from soon on. A name that another process holds is waited for: it
  // ends within the time to live of a process that died. Announced again: the value changes.
  // So who announces the same name as others stands for an election: state().held says whether it is won.
  virtual void announce(const std::string& name, const std::string& value) = 0;
  virtual void withdraw(const std::string& name) = 0;

  // Calls `on_change` with all that is there under `prefix`, soon, and after every change. Changes
  // that come close together may come as one.
  using Entries = std::map<std::string, std::string>;  // name -> value
  virtual void watch(const std::string& prefix, std::function<void(const Entries&)> on_change) = 0;

  virtual RegistryState state() const = 0;
};

}  // namespace xpyd::disagg
