// Two network namespaces, "hosts", joined by a cable that can be pulled. Needs root.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "base/status.h"
#include "tests/catch.h"

namespace xpyd::testing {

inline int run(const std::string& command) {
  int status = std::system((command + " >/dev/null 2>&1").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Two namespaces, 10.77.0.1 and 10.77.0.2, made and used by name, and removed with this object.
class TwoHosts {
 public:
  TwoHosts() {
    std::string id = std::to_string(getpid() % 100000);
    a = "xpyda" + id;
    b = "xpydb" + id;
    for (const std::string& command :
         {"ip netns add " + a, "ip netns add " + b,
          "ip -n " + a + " link add veth0 type veth peer name veth0 netns " + b,
          "ip -n " + a + " addr add 10.77.0.1/24 dev veth0", "ip -n " + b + " addr add 10.77.0.2/24 dev veth0",
          "ip -n " + a + " link set veth0 up", "ip -n " + b + " link set veth0 up", "ip -n " + a + " link set lo up"}) {
      if (run(command) == 0) continue;
      missing = "no network namespaces here: `" + command + "` failed";
      return;
    }
  }
  ~TwoHosts() {
    run("ip netns del " + a);
    run("ip netns del " + b);
  }
  void cable(bool plugged) { REQUIRE(run("ip -n " + b + " link set veth0 " + (plugged ? "up" : "down")) == 0); }
  // Moves the calling thread to `host`. A namespace belongs to a thread, so sockets belong to the host of the thread
  // that makes them.
  static void enter(const std::string& host) {
    int fd = open(("/var/run/netns/" + host).c_str(), O_RDONLY | O_CLOEXEC);
    XPYD_CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
  }
  template <class F>
  static void on(const std::string& host, F f) {
    std::thread([&] {
      enter(host);
      f();
    }).join();
  }

  std::string a, b, missing;
};

}  // namespace xpyd::testing
