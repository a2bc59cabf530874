// The cost of a token event between processes: codec, frame, socket, wake-up.
//
// Expected: an event of 130 bytes has 40 fields of a few ns in each direction. SipHash at a byte per ns takes 0.15 us.
// A send and a receive on loopback are two system calls of 2 us plus the kernel's TCP; a Unix socket takes half of
// that. One way also wakes the peer's I/O thread: 5 to 50 us if the other core sleeps, nothing if it spins.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "base/files.h"
#include "disagg/messages.h"
#include "disagg/net/channel.h"
#include "disagg/net/hello.h"
#include "disagg/processes/codec.h"
#include "experiments/bench/harness.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

double cpu_seconds() {
  rusage used;
  getrusage(RUSAGE_SELF, &used);
  auto seconds = [](timeval t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

TokenOf event() {
  TokenOf token;
  token.attempt = 12345;
  token.index = 100;
  token.event.request_id = 77;
  token.event.token = 4711;
  token.event.text = " token";
  token.event.queued_s = token.event.scheduled_s = token.event.time_s = 1000;
  return token;
}

// Two event loops in this process, connected in the same way as two processes.
struct Pair {
  RealClock clock;
  std::atomic<int64_t> received{0}, returned{0};
  std::unique_ptr<ControlLoop> server, client;
  ChannelPtr near;
  PrivateFolder folder;

  Pair(bool tcp, double spin_s, bool echo) {
    ChannelLimits limits;
    limits.spin_s = spin_s;
    server = std::make_unique<ControlLoop>(clock, limits);
    client = std::make_unique<ControlLoop>(clock, limits);
    XPYD_CHECK(!folder.path().empty(), "cannot create a temporary folder");
    ControlEndpoint at{tcp ? "127.0.0.1:0" : "unix:" + folder.path() + "/socket",
                       ClusterKey::random(),
                       {NodeRole::conductor, "server"}};
    auto bound = server->listen(at, [this, echo](ChannelPtr channel) {
      ChannelEvents events;
      events.on_frame = [this, echo, c = channel.get()](uint16_t type, std::string_view payload) {
        received.fetch_add(1, std::memory_order_release);
        if (echo) c->send(type, payload);
      };
      return events;
    });
    XPYD_CHECK(bound.ok(), bound.error().message);
    at.address = bound.value();
    auto channel = client->connect(at, 5, [this](ChannelPtr) {
      ChannelEvents events;
      events.on_frame = [this](uint16_t, std::string_view) { returned.fetch_add(1, std::memory_order_release); };
      return events;
    });
    XPYD_CHECK(channel.ok(), channel.error().message);
    near = channel.value();
  }
  ~Pair() {
    client.reset();
    server.reset();
  }
};

void round_trips(Bench& bench, bool tcp, double spin_s) {
  Pair pair(tcp, spin_s, true);
  const std::string payload = encode(1, kConductor, event(), 1000);
  std::vector<double> one_way;
  double cpu = cpu_seconds();
  constexpr int kTrips = 4000;
  for (int i = 0; i < kTrips; ++i) {
    double start = pair.clock.now();
    pair.near->send(20, payload);
    // The asking thread spins on its own core, so only the two loops are measured.
    while (pair.returned.load(std::memory_order_acquire) <= i) __builtin_ia32_pause();
    one_way.push_back((pair.clock.now() - start) / 2);
  }
  cpu = cpu_seconds() - cpu;
  std::sort(one_way.begin(), one_way.end());
  bench.report(
      {.name = std::string("one way, ") + (tcp ? "loopback TCP" : "Unix socket") + (spin_s > 0 ? ", spinning" : ""),
       .n_threads = 2,
       .rounds = kTrips,
       .seconds = percentile(one_way, 50),
       .measure = "p99 in us",
       .share = percentile(one_way, 99) * 1e6});
}

// Sends as an engine does: a batch of events per step.
void streams(Bench& bench, bool tcp, int batch) {
  Pair pair(tcp, 0, false);
  const TokenOf token = event();
  constexpr int kMessages = 100000;
  double cpu = cpu_seconds(), start = pair.clock.now();
  for (int i = 0; i < kMessages; ++i) {
    pair.near->send(20, encode(1, kConductor, token, 1000), (i + 1) % batch != 0);
    if ((i + 1) % 4096 == 0)  // no more in flight than the queue holds
      while (pair.received.load() < i + 1) usleep(50);
  }
  pair.near->send(20, "");
  while (pair.received.load() < kMessages + 1) usleep(50);
  double seconds = pair.clock.now() - start;
  cpu = cpu_seconds() - cpu;
  bench.report({.name = std::string("event, ") + (tcp ? "loopback TCP" : "Unix socket") + ", " + std::to_string(batch) +
                        " per system call",
                .n_threads = 2,
                .rounds = kMessages,
                .seconds = seconds / kMessages,
                .measure = "CPU in us per message, both sides",
                .share = cpu / kMessages * 1e6});
}

void bench_control(Bench& bench) {
  const TokenOf token = event();
  const std::string payload = encode(1, kConductor, token, 1000);
  std::printf("a token event: %zu bytes of payload, %zu bytes as a frame\n", payload.size(),
              payload.size() + kFrameOverheadBytes);
  std::string frame, out;
  const SipKey key{1, 2};
  FrameWriter writer(key);
  const Work one_payload{.bytes = double(payload.size())};
  bench.measure({
      {.name = "encode a token event",
       .run = [&] { out = encode(1, kConductor, token, 1000); },
       .check = [] { return ""; },
       .work = one_payload,
       .limit = Limit::none},
      {.name = "decode a token event",
       .run = [&] { XPYD_CHECK(decode(frame_type(token), payload, 1000).ok()); },
       .check = [] { return ""; },
       .work = one_payload,
       .limit = Limit::none},
      {.name = "frame it: SipHash-2-4",
       .run =
           [&] {
             frame.clear();
             writer.append(frame, 20, payload);
           },
       .check = [] { return ""; },
       .work = one_payload,
       .limit = Limit::none},
      {.name = "HMAC-SHA256 of it, for comparison",
       .run = [&] { frame.assign(1, char(hmac_sha256("0123456789abcdef", payload)[0])); },
       .check = [] { return ""; },
       .work = one_payload,
       .limit = Limit::none},
  });
  for (bool tcp : {true, false})
    for (double spin_s : {0.0, 100e-6}) round_trips(bench, tcp, spin_s);
  for (bool tcp : {true, false})
    for (int batch : {1, 16, 64}) streams(bench, tcp, batch);
}

REGISTER_BENCH("control", bench_control);

}  // namespace
}  // namespace xpyd::experiments
