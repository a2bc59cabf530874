// Strangers that connect to a KV wire and say nothing do not keep a peer out.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "tests/catch.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::strangers_test {
namespace {

// A connection to where an address of a wire leads to.
int call(const std::string& address) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_in);
  int fd;
  if (address.starts_with("shm:@")) {
    auto& at = reinterpret_cast<sockaddr_un&>(storage);
    const std::string name = address.substr(5);
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, name.data(), name.size());
    length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  } else {  // KIND,HOST,PORT,…
    auto& at = reinterpret_cast<sockaddr_in&>(storage);
    const char separator = ',';
    const size_t host = address.find(separator) + 1, port = address.find(separator, host) + 1;
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(uint16_t(std::stoi(address.substr(port))));
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  }
  REQUIRE(fd >= 0);
  (void)!connect(fd, reinterpret_cast<sockaddr*>(&storage), length);
  return fd;
}

TEST_CASE("transport: silent strangers at the port of a wire do not keep a peer out", "[transport]") {
  for (const Wire& wire : wires()) {
    if (wire.name == "local" || !wire.shares_process) continue;
    if (wire.missing && !wire.missing().empty()) {
      mark_skipped(wire.missing());
      continue;
    }
    INFO(wire.name);
    RealClock clock;
    const auto memory = wire.memory(1 << 16), theirs = wire.memory(1 << 16);
    TransportOptions options{
        .regions = {{memory.get(), 1 << 16}}, .queue = &cpu_queue(), .clock = &clock, .self = 1, .connect_s = 5};
    auto here = wire.make(options).value();
    std::vector<int> strangers;
    for (int i = 0; i < 200; ++i) {
      strangers.push_back(call(here->address()));
      // Some wires let one in at a time: their door stays passable.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    options.regions = {{theirs.get(), 1 << 16}};
    options.self = 2;
    auto there = wire.make(options).value();
    Result<bool> connected = false;
    const double until_s = clock.now() + 10;
    while (connected && !connected.value() && clock.now() < until_s) {
      connected = there->connect(1, here->address());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const std::string why = connected ? "" : connected.error().message;
    INFO(why);
    CHECK((connected && connected.value()));
    for (int fd : strangers) close(fd);
  }
}

}  // namespace
}  // namespace xpyd::testing::strangers_test
