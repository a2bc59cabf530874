// Channels between two network namespaces.
#include "tests/disagg/control_end.h"
#include "tests/two_hosts.h"

namespace xpyd::testing::control_netns_test {
namespace {

TEST_CASE("a channel between hosts ends when the cable is pulled and comes back with it", "[disagg][control][netns]") {
  if (geteuid() != 0) SKIP_TEST("network namespaces need root");
  TwoHosts hosts;
  if (!hosts.missing.empty()) SKIP_TEST(hosts.missing);
  RealClock clock;
  ChannelLimits limits;
  limits.heartbeat_s = 0.2;
  limits.silence_timeout_s = 2;
  const ClusterKey key = ClusterKey::random();
  End conductor, worker;
  std::unique_ptr<ControlLoop> conductor_loop, worker_loop;
  ControlEndpoint endpoint{"", key, {NodeRole::prefill, "P0"}};
  TwoHosts::on(hosts.a, [&] {
    conductor_loop = std::make_unique<ControlLoop>(clock, limits);
    auto bound = conductor_loop->listen({"10.77.0.1:0", key, {NodeRole::conductor, "conductor"}}, conductor.on_open());
    XPYD_CHECK(bound.ok());
    endpoint.address = bound.value();
  });
  TwoHosts::on(hosts.b, [&] { worker_loop = std::make_unique<ControlLoop>(clock, limits); });
  auto connect = [&] { return worker_loop->connect(endpoint, 0.5, worker.on_open()); };
  for (int round = 1; round <= 2; ++round) {
    INFO("round " << round);
    // A crowded machine may be late, and may lose a channel on its own: then again.
    const std::string text = "round " + std::to_string(round);
    auto came = [&] { return !conductor.frames.empty() && conductor.frames.back().second == text; };
    for (bool done = false; !done;) {
      auto channel = connect();
      if (!channel || !channel.value()->send(16, text)) continue;
      conductor.wait([&] { return (done = came()) || conductor.closes == conductor.opens; });
    }
    if (round == 2) break;
    // No packet says that the cable is out. Both sides find out by the silence.
    hosts.cable(false);
    conductor.wait([&] { return conductor.closes == conductor.opens; });
    worker.wait([&] { return worker.closes == worker.opens; });
    CHECK(conductor.closed.find("silent for") != std::string::npos);
    CHECK(worker.closed.find("silent for") != std::string::npos);
    CHECK_FALSE(connect().ok());
    hosts.cable(true);
  }
  worker_loop.reset();
  conductor_loop.reset();
}

}  // namespace
}  // namespace xpyd::testing::control_netns_test
