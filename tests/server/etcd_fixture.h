// Starts an etcd on a random port of this host (Debian's etcd-server), where it is installed.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing {

// Looks in PATH and where `make check STAGE=etcd` puts it. Returns "" where it is absent.
inline std::string find_etcd() {
  std::vector<std::string> places{"build/etcd/usr/bin"};
  std::string path = std::getenv("PATH") ? std::getenv("PATH") : "";
  for (size_t at = 0; at <= path.size();) {
    size_t end = std::min(path.find(':', at), path.size());
    places.push_back(path.substr(at, end - at));
    at = end + 1;
  }
  for (const std::string& place : places)
    if (access((place + "/etcd").c_str(), X_OK) == 0) return place + "/etcd";
  return "";
}

class Etcd {
 public:
  // Listens on an address of the calling thread's network namespace.
  explicit Etcd(const std::string& host = "127.0.0.1") : host_(host), port_(free_port()), peer_port_(free_port()) {
    start();
  }
  ~Etcd() { kill(); }
  std::string url() const { return "etcd://" + host_ + ":" + std::to_string(port_) + "/test"; }
  int port() const { return port_; }

  void start() {
    const std::string binary = find_etcd(), data = dir_.path + "/data";
    auto at = [&](int port) { return "http://" + host_ + ":" + std::to_string(port); };
    std::vector<std::string> words{
        binary, "--data-dir", data, "--listen-client-urls", at(port_), "--advertise-client-urls", at(port_),
        "--listen-peer-urls", at(peer_port_), "--initial-advertise-peer-urls", at(peer_port_), "--initial-cluster",
        "default=" + at(peer_port_),
        // Elections end within 100 ms, so restarts and leases can be short.
        "--heartbeat-interval", "10", "--election-timeout", "100", "--logger", "zap", "--log-level", "error"};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = fork();
    XPYD_CHECK(pid_ >= 0);
    if (pid_ == 0) {
      if (!std::freopen("/dev/null", "w", stdout) || !std::freopen("/dev/null", "w", stderr)) _exit(126);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void forget_everything() { std::filesystem::remove_all(dir_.path + "/data"); }

 private:
  TempDir dir_;
  std::string host_;
  int port_, peer_port_;
  pid_t pid_ = -1;
};

}  // namespace xpyd::testing
