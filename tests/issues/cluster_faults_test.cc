// Instances of one process end every request over transports with faults.

#include <netinet/in.h>
#include <sys/socket.h>

#include "disagg/transport/bootstrap.h"
#include "tests/program.h"
#include "tests/tiny_model.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing::cluster_faults_test {

// A request that waited for its next try was looked at only when something else happened.
TEST_CASE("a request whose attempts fail again and again in one process is given up", "[issues][lost_posts]") {
  struct Deaf final : WrappedTransport {
    using WrappedTransport::WrappedTransport;
    Result<RemoteKey> open(PeerId, KvOp, std::span<const MemoryRange>) override { return invalid("no windows today"); }
  };
  TinyCluster tiny({.topology = "1P1D"}, [](const TransportOptions& options) -> Result<std::unique_ptr<KvTransport>> {
    return std::unique_ptr<KvTransport>(std::make_unique<Deaf>("local", options));
  });
  REQUIRE(tiny.cluster->start().ok());
  auto request = tiny_request(1, std::vector<int32_t>(30, 1), 300);  // each try brings a token from P
  request->ignore_eos = true;
  REQUIRE(tiny.submit(request).ok());
  CHECK(tiny.cluster->wait_idle(60));
  CHECK(tiny.recorder->choice(1).finish == FinishReason::error);
  tiny.cluster->stop();
}

// The transport connected again only when it was asked to, and no instance asked.
TEST_CASE("a data connection that breaks alone is made anew", "[issues][lost_posts]") {
  TinyCluster tiny({.topology = "1P1D", .transport = "tcp"});
  REQUIRE(tiny.cluster->start().ok());
  const auto refused_after = [&](uint64_t id) {
    REQUIRE(tiny.submit(tiny_request(id, std::vector<int32_t>(40, int32_t(id % 96)), 4)).ok());
    REQUIRE(tiny.cluster->wait_idle(60));
    return tiny.cluster->stats().instances[1].kv_refused;
  };
  REQUIRE(refused_after(0) == 0);
  const auto owner = parse_transport_address("tcp", tiny.cluster->instances()[1]->info().address).value();
  int broken = 0;
  for (int fd = 0; fd < 4096; ++fd) {
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.sin_family == AF_INET &&
        ntohs(peer.sin_port) == owner.port)
      broken += ::shutdown(fd, SHUT_RDWR) == 0;
  }
  REQUIRE(broken > 0);
  int64_t refused = 0;
  uint64_t id = 0;
  CHECK(until(60, [&] {  // prompts that come while the connection is made may still be computed by D
    const int64_t now = refused_after(++id);
    return id > 1 && std::exchange(refused, now) == now;
  }));
  tiny.cluster->stop();
}

TEST_CASE("issue: none of 1,000 prompts that come at once is refused", "[cluster]") {
  TinyCluster tiny({.topology = "1P1D"});
  for (uint64_t id = 0; id < 1000; ++id) REQUIRE(tiny.submit(tiny_request(id, std::vector<int32_t>(20, 7), 1)).ok());
  tiny.run();
  CHECK(tiny.recorder->ended() == 1000);
}

}  // namespace xpyd::testing::cluster_faults_test
