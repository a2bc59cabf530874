// Channels over real sockets of this host.
#include <atomic>
#include <filesystem>
#include <future>
#include <limits>
#include <thread>

#include "tests/disagg/control_end.h"

namespace xpyd::testing::control_channel_test {

// Moves only when told to, so that no test waits for a timeout.
class ManualClock final : public Clock {
 public:
  double now() override { return seconds_.load(); }
  void advance(double seconds) { seconds_ = seconds_ + seconds; }

 private:
  std::atomic<double> seconds_{1000};
};

struct Rig {
  ManualClock clock;
  ClusterKey key = ClusterKey::random();
  ControlEndpoint server{"127.0.0.1:0", key, {"conductor", 1}};
  ControlEndpoint client{"", key, {"D0", 2}};
  End near, far;  // the connecting end, the accepting end
  std::unique_ptr<ControlLoop> far_loop, near_loop;

  explicit Rig(const std::string& address = "127.0.0.1:0", const ChannelLimits& limits = {}) {
    server.address = address;
    far_loop = std::make_unique<ControlLoop>(clock, limits);
    near_loop = std::make_unique<ControlLoop>(clock, limits);
    auto bound = far_loop->listen(server, far.on_open());
    REQUIRE(bound.ok());
    client.address = bound.value();
  }
  ChannelPtr connect() {
    auto channel = near_loop->connect(client, 30, near.on_open());
    if (!channel) FAIL(channel.error().message);
    far.wait([&] { return far.opens > 0; });
    return channel.value();
  }
  std::string connect_error(const ControlEndpoint& endpoint) {
    auto channel = near_loop->connect(endpoint, 30, near.on_open());
    return channel ? "" : channel.error().message;
  }
};

// Stops a loop until go_on(), as SIGSTOP would stop its process.
class Stopped {
 public:
  explicit Stopped(ControlLoop& loop) {
    loop.post([this, over = go_on_.get_future().share()] {
      stopped_.set_value();
      over.wait();
    });
    stopped_.get_future().wait();
  }
  ~Stopped() { go_on(); }
  void go_on() {
    if (!std::exchange(over_, true)) go_on_.set_value();
  }

 private:
  std::promise<void> stopped_, go_on_;
  bool over_ = false;
};

TEST_CASE("a channel carries frames both ways, in order", "[disagg][control]") {
  TempDir dir;
  for (std::string address : {std::string("127.0.0.1:0"), "unix:" + dir.path + "/socket"}) {
    INFO(address);
    Rig rig(address);
    ChannelPtr near = rig.connect();
    CHECK(near->peer().id == "conductor");
    CHECK(rig.far.channel->peer().id == "D0");
    CHECK(rig.far.channel->peer().fingerprint == 2);
    CHECK(rig.far.channel->address() == "D0");
    const std::string big(256 << 10, 'b');
    for (int i = 0; i < 1000; ++i) {
      // Both directions send at once, so that each waits for the other's kernel to take bytes.
      REQUIRE(near->send(16, std::to_string(i), i % 7 != 0));
      REQUIRE(rig.far.channel->send(17, i % 100 == 0 ? big : std::to_string(i)));
    }
    REQUIRE(near->send(18, ""));
    rig.far.wait([&] { return rig.far.frames.size() == 1001; });
    rig.near.wait([&] { return rig.near.frames.size() == 1000; });
    for (int i = 0; i < 1000; ++i) {
      CHECK(rig.far.frames[i] == std::pair<int, std::string>(16, std::to_string(i)));
      CHECK(rig.near.frames[i].second == (i % 100 == 0 ? big : std::to_string(i)));
    }
    CHECK(rig.far.frames[1000].first == 18);
    // Frames that were sent before a close arrive before it.
    REQUIRE(near->send(16, "last words"));
    near->close("enough");
    CHECK(!near->send(16, "too late"));
    near->close("again");
    rig.near.wait_closed();
    rig.far.wait_closed();
    CHECK(rig.near.closed == "enough");
    CHECK(rig.far.closed == "the peer left: enough");
    CHECK(rig.far.frames.back().second == "last words");
    CHECK(!rig.far.channel->send(16, "x"));
    rig.far_loop.reset();
    rig.near_loop.reset();
    CHECK(rig.near.closes == 1);
    CHECK(rig.far.closes == 1);
    CHECK_FALSE(std::filesystem::exists(dir.path + "/socket"));
  }
}

TEST_CASE("many threads send on one channel", "[disagg][control]") {
  Rig rig;
  ChannelPtr near = rig.connect();
  constexpr int kThreads = 4, kEach = 2000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) XPYD_CHECK(near->send(uint16_t(16 + t), std::to_string(i), (i + t) % 3 != 0));
      XPYD_CHECK(near->send(uint16_t(16 + t), "end"));
    });
  for (auto& thread : threads) thread.join();
  rig.far.wait([&] { return rig.far.frames.size() == kThreads * (kEach + 1); });
  int next[kThreads] = {};
  for (auto& [type, payload] : rig.far.frames) {
    int& i = next[type - 16];
    REQUIRE(payload == (i == kEach ? "end" : std::to_string(i)));
    ++i;
  }
}

TEST_CASE("a channel accepts members alone", "[disagg][control]") {
  Rig rig;
  ControlEndpoint other = rig.client;
  other.key = ClusterKey::random();
  std::string error = rig.connect_error(other);
  CHECK(error.find("it probably has a different cluster key") != std::string::npos);
  CHECK(error.find(rig.client.address) != std::string::npos);
  other.key = ClusterKey();
  CHECK(rig.connect_error(other).find("a different cluster key") != std::string::npos);
  CHECK(rig.far.opens == 0);
  for (std::string words : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(1 << 20, '\x01')}) {
    Stranger stranger(rig.client.address);
    stranger.say(words);
    CHECK(stranger.hear() == "");  // it learns nothing and is disconnected
  }
  CHECK(rig.far.opens == 0);
  rig.connect();  // members may join all the while
}

TEST_CASE("a stranger has five seconds", "[disagg][control]") {
  Rig rig;
  Stranger silent(rig.client.address);
  // The accept must happen before the clock moves. A connection that comes later waits behind it.
  rig.connect();
  rig.clock.advance(5.01);
  CHECK(silent.hear() == "");
}

TEST_CASE("a peer whose heartbeats stop is closed, and an idle peer is not", "[disagg][control]") {
  Rig rig;
  ChannelPtr near = rig.connect();
  // Heartbeats alone keep a channel open for 30 s. Each step is shorter than the silence that is allowed.
  for (int i = 0; i < 30; ++i) {
    rig.clock.advance(1);
    for (const ChannelPtr& end : {near, rig.far.channel})
      while (end->heard_s() < rig.clock.now() && end->is_open()) std::this_thread::yield();
  }
  CHECK(near->is_open());
  Stopped stopped(*rig.near_loop);
  rig.clock.advance(3.5);
  rig.far.wait_closed();
  CHECK(rig.far.closed.find("silent for 3") != std::string::npos);
  stopped.go_on();
  rig.near.wait_closed();  // it goes on and finds itself closed
  CHECK(!near->is_open());
}

TEST_CASE("a dial waits for nobody: a silent peer delays no other one", "[disagg][control]") {
  Rig rig;
  End other;
  ControlLoop other_loop(rig.clock);
  auto bound = other_loop.listen({"127.0.0.1:0", rig.key, rig.server.self}, other.on_open());
  REQUIRE(bound.ok());
  Stopped stopped(*rig.far_loop);
  std::promise<Result<ChannelPtr>> silent, open;
  rig.near_loop->dial(rig.client, 5, rig.near.on_open(), [&](Result<ChannelPtr> r) { silent.set_value(std::move(r)); });
  rig.near_loop->dial({bound.value(), rig.key, rig.client.self}, 5, rig.near.on_open(),
                      [&](Result<ChannelPtr> r) { open.set_value(std::move(r)); });
  const Result<ChannelPtr> channel = open.get_future().get();  // while the first dial has no answer
  REQUIRE(channel.ok());
  CHECK(channel.value()->is_open());
  rig.clock.advance(5.5);
  const Result<ChannelPtr> none = silent.get_future().get();
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().message.find("not complete in time") != std::string::npos);
  rig.near_loop->dial({"nowhere", rig.key, rig.client.self}, 5, rig.near.on_open(),
                      [&](const Result<ChannelPtr>& r) { CHECK_FALSE(r.ok()); });
}

TEST_CASE("a peer that does not read is closed before its queue exceeds the limit", "[disagg][control]") {
  ChannelLimits limits;
  limits.max_unsent_bytes = 4 << 20;
  Rig rig("127.0.0.1:0", limits);
  ChannelPtr near = rig.connect();
  Stopped stopped(*rig.far_loop);
  const std::string megabyte(1 << 20, 'm');
  int sent = 0;
  while (near->send(16, megabyte)) REQUIRE(++sent < 1000);
  rig.near.wait_closed();
  CHECK(rig.near.closed.find("does not read") != std::string::npos);
  stopped.go_on();
  rig.far.wait_closed();
}

// A delayed message would wait for the loop's next look at deadlines. On a transport's channel there is none.
TEST_CASE("a long message from another thread is sent without delay", "[disagg][control]") {
  ChannelLimits limits;
  limits.heartbeat_s = limits.silence_timeout_s = std::numeric_limits<double>::infinity();
  Rig rig("127.0.0.1:0", limits);
  ChannelPtr near = rig.connect();
  std::promise<void> sent;
  rig.far.reply = [&](End&, std::string_view payload) {
    if (payload.size() == 2) sent.get_future().wait();  // the socket fills meanwhile
  };
  usleep(50000);  // both threads sleep
  near->send(16, "go");
  near->send(16, std::string(16 << 20, 'x'));
  sent.set_value();
  rig.far.wait([&] { return rig.far.frames.size() == 2; });
  CHECK(rig.far.frames[1].second.size() == 16 << 20);
}

TEST_CASE("a forged frame ends the channel", "[disagg][control]") {
  Rig rig;
  // The sender has the cluster's key, and somebody on the way repeats its frame.
  Stranger stranger(rig.client.address);
  Handshake handshake(Handshake::Side::initiator, rig.key, rig.client.self);
  stranger.shake(handshake);
  REQUIRE(handshake.done());
  FrameWriter writer(handshake.send_key());
  std::string frame;
  writer.append(frame, 16, "honest");
  stranger.say(frame + frame);
  rig.far.wait_closed();
  CHECK(rig.far.frames.size() == 1);
  CHECK(rig.far.closed.find("sequence number") != std::string::npos);
}

TEST_CASE("connect() reports that nobody listens at an address", "[disagg][control]") {
  TempDir dir;
  Rig rig;
  ControlEndpoint endpoint = rig.client;
  std::string port = rig.client.address;
  rig.far_loop.reset();
  CHECK(rig.connect_error(endpoint).find("Connection refused") != std::string::npos);
  endpoint.address = "unix:" + dir.path + "/nobody";
  CHECK(rig.connect_error(endpoint).find("No such file") != std::string::npos);
  for (const char* bad : {"", "127.0.0.1", "127.0.0.1:65536", ":80", "::1:80", "unix:", "127.0.0.1:8x"})
    CHECK(!parse_control_address(bad).ok());
  CHECK(!parse_control_address("unix:" + std::string(200, 'p')).ok());
  CHECK(parse_control_address("[::1]:80").ok());
}

TEST_CASE("an endpoint without a key stays on this host", "[disagg][control]") {
  Rig rig;
  ControlEndpoint open{"0.0.0.0:0", ClusterKey(), {"c"}};
  auto bound = rig.far_loop->listen(open, rig.far.on_open());
  REQUIRE(!bound.ok());
  CHECK(bound.error().message.find("--cluster-key-file") != std::string::npos);
  open.address = "192.0.2.1:1";
  CHECK(rig.connect_error(open).find("--cluster-key-file") != std::string::npos);
  open.key = rig.key;
  open.address = "0.0.0.0:0";
  CHECK(rig.far_loop->listen(open, rig.far.on_open()).ok());
  for (const char* address : {"127.0.0.1:0", "localhost:0"}) {
    ControlEndpoint local{address, ClusterKey(), {"c"}};
    auto where = rig.far_loop->listen(local, rig.far.on_open());
    REQUIRE(where.ok());
    ControlEndpoint client{where.value(), ClusterKey(), {"t"}};
    CHECK(rig.connect_error(client) == "");
  }
}

}  // namespace xpyd::testing::control_channel_test
