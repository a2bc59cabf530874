// Channels between two network namespaces.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "disagg/control/joiner.h"
#include "tests/two_hosts.h"

namespace xpyd::testing {
namespace {

struct Side {
  std::mutex mutex;
  std::condition_variable changed;
  int opened = 0, closed = 0;
  std::string reason;
  ChannelPtr channel;
  std::vector<std::string> frames;

  OnOpen on_open() {
    return [this](ChannelPtr c) {
      std::lock_guard lock(mutex);
      channel = c;
      ++opened;
      changed.notify_all();
      ChannelEvents events;
      events.on_frame = [this](uint16_t, std::string_view payload) {
        std::lock_guard inner(mutex);
        frames.emplace_back(payload);
        changed.notify_all();
      };
      events.on_closed = [this](const std::string& why) {
        std::lock_guard inner(mutex);
        ++closed;
        reason = why;
        changed.notify_all();
      };
      return events;
    };
  }
  template <class Condition>
  void wait(Condition condition) {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, std::chrono::seconds(60), condition)) FAIL("waited for a minute");
  }
};

TEST_CASE("a channel between hosts ends when the cable is pulled and comes back with it",
          "[disagg][control][netns]") {
  if (geteuid() != 0) SKIP_TEST("network namespaces need root");
  TwoHosts hosts;
  if (!hosts.missing.empty()) SKIP_TEST(hosts.missing);
  RealClock clock;
  ChannelLimits limits;
  limits.heartbeat_s = 0.2;
  limits.silence_timeout_s = 2;
  const ClusterKey key = ClusterKey::random();
  Side conductor, worker;
  std::unique_ptr<ControlLoop> conductor_loop, worker_loop;
  std::unique_ptr<Joiner> joiner;
  std::string address;
  TwoHosts::on(hosts.a, [&] {
    conductor_loop = std::make_unique<ControlLoop>(clock, limits);
    auto bound = conductor_loop->listen({"10.77.0.1:0", key, {NodeRole::conductor, "conductor"}},
                                        conductor.on_open());
    XPYD_CHECK(bound.ok());
    address = bound.value();
  });
  TwoHosts::on(hosts.b, [&] {
    worker_loop = std::make_unique<ControlLoop>(clock, limits);
    joiner = std::make_unique<Joiner>(*worker_loop,
                                      ControlEndpoint{address, key, {NodeRole::prefill, "P0"}},
                                      worker.on_open(), JoinerOptions{.connect_timeout_s = 0.5});
  });
  auto count = [](Side& side, int Side::*which) {
    std::lock_guard lock(side.mutex);
    return side.*which;
  };
  int opened = 0;  // a crowded machine may lose the channel on its own: count from here
  for (int round = 1; round <= 2; ++round) {
    INFO("round " << round);
    worker.wait([&] { return worker.opened > opened; });
    const std::string text = "round " + std::to_string(round);
    REQUIRE(worker.channel->send(16, text));
    conductor.wait([&] { return !conductor.frames.empty() && conductor.frames.back() == text; });
    if (round == 2) break;
    // No packet says that the cable is out. Both sides find out by the silence.
    const int conductor_closed = count(conductor, &Side::closed);
    const int worker_closed = count(worker, &Side::closed);
    hosts.cable(false);
    conductor.wait([&] { return conductor.closed > conductor_closed; });
    worker.wait([&] { return worker.closed > worker_closed; });
    CHECK(conductor.reason.find("silent for") != std::string::npos);
    CHECK(worker.reason.find("silent for") != std::string::npos);
    while (joiner->attempts() < 2) std::this_thread::yield();  // it goes on trying
    opened = count(worker, &Side::opened);
    hosts.cable(true);
  }
  joiner.reset();
  worker_loop.reset();
  conductor_loop.reset();
}

}  // namespace
}  // namespace xpyd::testing
