// How a transport accepts peers. connect() of every transport with a handshake never blocks and fails by its deadline,
// towards a peer that accepts and is silent and towards one that does not accept. Silent strangers keep no peer out.
// Bytes that break the protocol close their connection, and nobody else notices.

#include <arpa/inet.h>
#include <netinet/in.h>

#include <optional>

#include "base/random.h"
#include "disagg/transport/bootstrap.h"
#include "disagg/transport/tcp/tcp_frames.h"
#include "disagg/transport/transports.h"
#include "experiments/connect_and_wait.h"
#include "tests/disagg/control_end.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::connect_test {

// Where a transport's address leads, on this host.
struct Place {
  explicit Place(const std::string& address)
      : kind(address.substr(0, address.find(','))), there(parse_transport_address(kind, address).value()) {
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(there.port);
  }
  sockaddr* at() { return reinterpret_cast<sockaddr*>(&to); }
  static int new_socket(int flags = 0) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    REQUIRE(fd >= 0);
    return fd;
  }
  std::string kind;
  TransportAddress there;
  sockaddr_in to{};
  socklen_t length = sizeof to;
};

struct Sockets {
  ~Sockets() {
    for (int fd : fds) close(fd);
  }
  std::vector<int> fds;
};

// Listens where a transport's address leads, and never answers.
class SilentPeer {
 public:
  // `like` is a real address of that transport. If `full`, the backlog is full and nobody gets in.
  explicit SilentPeer(std::string like, bool full = false) : address(std::move(like)) {
    Place place(address);
    place.to.sin_port = 0;
    sockets_.fds.push_back(place.new_socket());
    REQUIRE(bind(sockets_.fds[0], place.at(), place.length) == 0);
    REQUIRE(::listen(sockets_.fds[0], full ? 0 : 64) == 0);
    REQUIRE(getsockname(sockets_.fds[0], place.at(), &place.length) == 0);
    for (int i = 0; full && i < 4; ++i) {  // connections that are never accepted
      sockets_.fds.push_back(place.new_socket(SOCK_NONBLOCK));
      (void)!connect(sockets_.fds.back(), place.at(), place.length);
    }
    place.there.port = ntohs(place.to.sin_port);
    address = to_text(place.kind, place.there);
  }
  std::string address;

 private:
  Sockets sockets_;
};

// Every transport with a handshake that works here.
void each_transport(const std::function<void(const TestedTransport&)>& test) {
  for (const TestedTransport& transport : tested_transports()) {
    if (transport.name == "local") continue;
    INFO(transport.name);
    transport.missing && !transport.missing().empty() ? mark_skipped(transport.missing()) : test(transport);
  }
}

TEST_CASE("connect: connect() never blocks on a peer that listens and stays silent", "[transport]") {
  each_transport([](const TestedTransport& transport) {
    for (bool full : {false, true}) {
      INFO((full ? "the backlog is full" : ""));
      VirtualClock clock;
      clock.seconds = 100;
      const auto memory = transport.memory(1 << 16), theirs = transport.memory(1 << 16);
      TransportOptions options{
          .regions = {{memory.get(), 1 << 16}}, .queue = &cpu_queue(), .clock = &clock, .self = 1, .connect_s = 3};
      auto here = transport.make(options).value();
      const SilentPeer silent(here->address(), full);
      for (int round = 0; round < 2; ++round) {  // it may be tried again
        for (int i = 0; i < 100; ++i) {  // a call that blocks would hang, because this clock does not move by itself
          const auto connected = here->connect(2, silent.address);
          REQUIRE(connected);
          REQUIRE(!connected.value());
          clock.seconds += 0.029;
        }
        clock.seconds += 0.2;
        const auto connected = here->connect(2, silent.address);
        REQUIRE(!connected);
        CHECK(connected.error().code == ErrorCode::unavailable);
        CHECK(connected.error().message.find("does not answer") != std::string::npos);
        CHECK(!here->open(2, KvOp::write, {}));
      }
      // An attempt is given up in the middle. Another peer is reached meanwhile, and later under this number.
      REQUIRE(here->connect(2, silent.address));
      if (!transport.shares_process) continue;
      options.regions = {{theirs.get(), 1 << 16}};
      options.self = 3;
      auto third = transport.make(options).value();
      REQUIRE(connect_and_wait(*here, 3, third->address()).ok());
      CHECK(!here->connect(2, silent.address).value());
      here->disconnect(2);
      REQUIRE(connect_and_wait(*here, 2, third->address()).ok());
      CHECK(here->connect(2, third->address()).value());
      CHECK(here->open(2, KvOp::write, {}));
      CHECK(!here->connect(2, silent.address));
    }
  });
}

TEST_CASE("transport: silent strangers at a transport's port do not keep a peer out", "[transport]") {
  each_transport([](const TestedTransport& transport) {
    if (!transport.shares_process) return;
    RealClock clock;
    const auto memory = transport.memory(1 << 16), theirs = transport.memory(1 << 16);
    TransportOptions options{
        .regions = {{memory.get(), 1 << 16}}, .queue = &cpu_queue(), .clock = &clock, .self = 1, .connect_s = 60};
    auto here = transport.make(options).value();
    Sockets strangers;
    Place door(here->address());
    for (int i = 0; i < 200; ++i) {
      const int fd = strangers.fds.emplace_back(door.new_socket(SOCK_NONBLOCK));
      wait_until([&] { return connect(fd, door.at(), door.length) == 0 || errno != EAGAIN; });  // a full backlog
      pollfd inside{fd, POLLOUT, 0};
      CHECK(poll(&inside, 1, 60000) == 1);
    }
    options.regions = {{theirs.get(), 1 << 16}};
    options.self = 2;
    const Status connected = connect_and_wait(*transport.make(options).value(), 1, here->address());
    INFO((connected ? "" : connected.error().message));
    CHECK(connected.ok());
  });
}

// Sends `bytes` and returns what the other side says until it closes; with `end` false, closes without reading. A
// `hello` is sent first: with the right key the bytes then come from an accepted peer.
std::string say(const std::string& address, std::optional<Handshake> hello, const std::string& bytes, bool end = true) {
  Stranger stranger(address);
  std::string heard = hello ? stranger.shake(*hello) : "";
  stranger.say(bytes);
  if (!end) return heard;
  shutdown(stranger.fd, SHUT_WR);
  return heard + stranger.hear();
}

// A sender and an owner that must go on working, and the owner's address.
struct Door {
  explicit Door(std::string_view name) {
    const TestedTransport& transport = *std::ranges::find(tested_transports(), name, &TestedTransport::name);
    poster = make_side_here(transport, 1), owner = make_side_here(transport, 2);
    REQUIRE(poster->connect(2, owner->address()) == "");
    REQUIRE(owner->connect(1, poster->address()) == "");
    owner->fill(0, kSideBytes, 2);
    poster->fill(0, 1 << 20, 1);
    key = owner->open(1, KvOp::write, {{0, 1 << 20}});
    address = "127.0.0.1:" + std::to_string(Place(owner->address()).there.port);
  }
  void hears(const std::string& bytes, std::optional<Handshake> hello, size_t answer) {
    CHECK(say(address, std::move(hello), bytes).size() == answer);
  }
  void still_works() {
    CHECK(owner->differing(1 << 20, kSideBytes - (1 << 20), 2, 1 << 20) == 0);
    CHECK(settle(*poster, poster->post({2, KvOp::write, key}, {{0, 0, 1 << 20}})) == TransferState::done);
    CHECK(owner->differing(0, 1 << 20, 1) == 0);
  }
  std::unique_ptr<Side> poster, owner;
  RemoteKey key;
  std::string address;
};

std::string noise(Random& random, uint64_t bytes) {
  std::string text;
  for (; bytes > 0; --bytes) text.push_back(char(random.next()));
  return text;
}

TEST_CASE("tcp: garbage, strangers and frames that break a rule are closed", "[transport]") {
  using namespace tcp;
  Door door("tcp");
  const std::string token = parse_transport_address("tcp", door.owner->address()).value().token;
  const auto hello_of = [](const std::string& of, const std::string& id = "1") {
    return Handshake(Handshake::Side::initiator, ClusterKey::of(of), {id, 99});
  };
  std::string said, wrong_token = token;
  std::string_view none;
  REQUIRE(hello_of(token).feed(none, said).ok());
  std::string wrong_magic = said;
  wrong_magic[2] ^= 1, wrong_token[31] = wrong_token[31] == '0' ? '1' : '0';
  for (const std::string& bytes : {std::string(), std::string("x"), said.substr(0, 39),
                                   std::string("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n        "), wrong_magic})
    door.hears(bytes, {}, 0);
  door.hears("", hello_of(wrong_token), 0);
  (void)say(door.address, hello_of(token, "one"), "");  // a name that no instance can have
  door.hears("", hello_of(token), 0);
  (void)say(door.address, {}, said.substr(0, 20), false);

  struct Frame {
    FrameHead head;
    AddressRange range{1, 64};
  };
  const auto frame = [&](void (*change)(Frame&)) {
    Frame f{{.type = FrameType::write, .n_ranges = 1, .post = 1, .n_frames = 1, .registration = door.key, .bytes = 64}};
    change(f);
    return std::string(reinterpret_cast<const char*>(&f.head), sizeof f.head) +
           std::string(reinterpret_cast<const char*>(&f.range), sizeof f.range) + std::string(64, 'x') +
           std::string(8, 's');
  };
  constexpr void (*kAgainstRules[])(Frame&) = {
      [](Frame& f) { f.head.magic = 0; },
      [](Frame& f) { f.head.type = FrameType(77); },
      [](Frame& f) { f.head.type = FrameType::data; },
      [](Frame& f) { f.head.type = FrameType::placed; },
      [](Frame& f) { f.head.n_ranges = 65535; },
      [](Frame& f) { f.head.bytes = uint32_t(1) << 31; },
      [](Frame& f) { f.head.bytes = 65; },
      [](Frame& f) { f.range.bytes = 0; },
      [](Frame& f) { f.range.bytes = UINT64_MAX; },
      [](Frame& f) { f.head.frame = 1; },
      [](Frame& f) { f.head.n_frames = 0; },
  };
  for (const auto change : kAgainstRules) door.hears(frame(change), hello_of(token), 0);  // the connection ends
  constexpr void (*kNotAllowed[])(Frame&) = {
      [](Frame&) {},
      [](Frame& f) { f.range.begin = UINT64_MAX - 10; },
      [](Frame& f) { f.head.registration.secret ^= 1; },
      [](Frame& f) { f.head.registration.generation += 1; },
  };
  for (const auto change : kNotAllowed) door.hears(frame(change), hello_of(token), sizeof(FrameHead));  // answered
  // A transfer of two refused frames does not arrive with the last one.
  const int arrived = door.owner->arrived(door.key);
  const std::string first = frame([](Frame&f) { f.head.n_frames = 2; }),
                    last = frame([](Frame&f) { f.head.n_frames = 2, f.head.frame = 1; });
  door.hears(first + last, hello_of(token), 2 * sizeof(FrameHead));
  CHECK(door.owner->arrived(door.key) == arrived);
  // A frame that is cut before its end does not let the transfer arrive.
  for (size_t cut : {1, 48, 64, 90, 130}) door.hears(frame(kNotAllowed[0]).substr(0, cut), hello_of(token), 0);
  CHECK(door.owner->arrived(door.key) == arrived);
  Random random(6);
  for (int round = 0; round < 200; ++round) {  // noise, with and without a handshake
    const std::string bytes = noise(random, random.below(3000));
    say(door.address, round % 2 ? std::optional(hello_of(token)) : std::nullopt, bytes, round % 5 != 0);
  }
  door.still_works();
}

TEST_CASE("shm: garbage at its socket is closed", "[transport]") {
  Door door("shm");
  for (const std::string& bytes : {std::string(), std::string("x"), std::string(16, 'y'), std::string(5000, 'z')})
    door.hears(bytes, {}, 0);
  Random random(6);
  for (int round = 0; round < 300; ++round) say(door.address, {}, noise(random, 1 + random.below(40)), round % 5 != 0);
  door.still_works();
}

}  // namespace xpyd::testing::connect_test
