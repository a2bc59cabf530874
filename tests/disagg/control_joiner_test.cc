#include <condition_variable>
#include <mutex>

#include "disagg/control/joiner.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

// Counts what happens on one side; waits for conditions, not for time.
struct Events {
  std::mutex mutex;
  std::condition_variable changed;
  int opened = 0, closed = 0;
  std::string last_reason, last_peer;
  ChannelPtr channel;

  OnOpen on_open() {
    return [this](ChannelPtr opened_channel) {
      std::lock_guard lock(mutex);
      channel = opened_channel;
      last_peer = channel->peer().id;
      ++opened;
      changed.notify_all();
      ChannelEvents events;
      events.on_closed = [this](const std::string& reason) {
        std::lock_guard inner(mutex);
        ++closed;
        last_reason = reason;
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

struct Conductor {
  Events events;
  RealClock clock;
  ControlLoop loop{clock};
  std::string address;
  Conductor(const std::string& at, const ClusterKey& key, const std::string& id) {
    auto bound = loop.listen({at, key, {NodeRole::conductor, id}}, events.on_open());
    REQUIRE(bound.ok());
    address = bound.value();
  }
};

TEST_CASE("a worker follows its conductor", "[disagg][control]") {
  TempDir dir;
  const std::string socket = "unix:" + dir.path + "/conductor";
  const ClusterKey key = ClusterKey::random();
  RealClock clock;
  ControlLoop loop(clock);
  Events worker;
  Joiner joiner(loop, {socket, key, {NodeRole::prefill, "P0"}}, worker.on_open(),
                {.first_pause_s = 0.001, .longest_pause_s = 0.01});
  // Nobody is there yet; it goes on asking.
  while (joiner.attempts() < 3) std::this_thread::yield();
  CHECK(joiner.trouble().find(socket) != std::string::npos);
  auto first = std::make_unique<Conductor>(socket, key, "first");
  worker.wait([&] { return worker.opened == 1; });
  CHECK(worker.last_peer == "first");
  // It dies and starts again where it was.
  first.reset();
  worker.wait([&] { return worker.closed == 1; });
  first = std::make_unique<Conductor>(socket, key, "second");
  worker.wait([&] { return worker.opened == 2; });
  CHECK(worker.last_peer == "second");
  // Another takes over elsewhere, while the old one still lives.
  Conductor moved("127.0.0.1:0", key, "third");
  joiner.set_address(moved.address);
  worker.wait([&] { return worker.opened == 3; });
  CHECK(worker.closed == 2);
  CHECK(worker.last_peer == "third");
  CHECK(worker.last_reason == "the conductor has moved");
  first->events.wait([&] { return first->events.closed == 1; });
  CHECK(first->events.last_reason == "the peer left: the conductor has moved");
  // The same address again changes nothing; none keeps the channel.
  joiner.set_address(moved.address);
  joiner.set_address("");
  CHECK(worker.channel->is_open());
}

TEST_CASE("a worker that ends leaves its conductor", "[disagg][control]") {
  const ClusterKey key = ClusterKey::random();
  Conductor conductor("127.0.0.1:0", key, "c");
  RealClock clock;
  ControlLoop loop(clock);
  Events worker;
  {
    Joiner joiner(loop, {conductor.address, key, {NodeRole::decode, "D0"}}, worker.on_open());
    conductor.events.wait([&] { return conductor.events.opened == 1; });
    worker.wait([&] { return worker.opened == 1; });
  }
  CHECK(worker.closed == 1);
  conductor.events.wait([&] { return conductor.events.closed == 1; });
  CHECK(conductor.events.last_reason == "the peer left: the worker leaves");
  Joiner nowhere(loop, {"", key, {NodeRole::decode, "D1"}}, worker.on_open());  // ends at once
}

}  // namespace
}  // namespace xpyd::testing
