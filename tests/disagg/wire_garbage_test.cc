// What comes to a wire's door from those who are no peers: closed, counted, and nobody else
// notices.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "base/random.h"
#include "disagg/transport/tcp_frames.h"
#include "disagg/transport/wires.h"
#include "tests/catch.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::wire_garbage_test {
namespace {

const Wire& wire_named(std::string_view name) {
  for (const Wire& wire : wires())
    if (wire.name == name) return wire;
  throw std::runtime_error("no wire " + std::string(name));
}

template <class T>
void append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Sends, says that no more will come, and reads until the other side closes; what it said.
std::string say(const sockaddr* address, socklen_t length, int type, const std::string& bytes, bool end = true) {
  const int fd = socket(address->sa_family, type | SOCK_CLOEXEC, 0);
  REQUIRE(connect(fd, address, length) == 0);
  std::string heard;
  if (!bytes.empty()) send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (end) {
    shutdown(fd, SHUT_WR);
    char buffer[4096];
    for (ssize_t n; (n = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) heard.append(buffer, size_t(n));
  }
  close(fd);
  return heard;
}

// A poster and an owner that must go on working; and the owner's door.
struct Door {
  explicit Door(const char* name) : wire(wire_named(name)) {
    poster = make_side_here(wire, 1), owner = make_side_here(wire, 2);
    REQUIRE(poster->connect(2, owner->address()) == "");
    REQUIRE(owner->connect(1, poster->address()) == "");
    owner->fill(0, kSideBytes, 2);
    poster->fill(0, 1 << 20, 1);
    key = owner->open(1, KvOp::write, {{0, 1 << 20}});
  }
  void still_works() {
    CHECK(owner->differing(1 << 20, kSideBytes - (1 << 20), 2, 1 << 20) == 0);
    CHECK(settle(*poster, poster->post({2, KvOp::write, key}, {{0, 0, 1 << 20}})) == TransferState::done);
    CHECK(owner->differing(0, 1 << 20, 1) == 0);
  }
  void wait_refused(int64_t n) {  // the owner's thread counts when it sees
    RealClock clock;
    for (const double start = clock.now(); owner->stats().refused < n; sched_yield()) REQUIRE(clock.now() < start + 60);
    CHECK(owner->stats().refused == n);
  }
  const Wire& wire;
  std::unique_ptr<Side> poster, owner;
  WindowKey key;
};

TEST_CASE("tcp: garbage, strangers and frames against the rules are closed and counted", "[transport]") {
  Door door("tcp");
  const std::string address = door.owner->address();  // tcp:127.0.0.1:PORT:TOKEN
  const size_t port_at = address.find(':', 4) + 1, token_at = address.find(':', port_at) + 1;
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(uint16_t(std::stoi(address.substr(port_at))));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  using namespace tcp;
  TcpHello hello;
  hello.session = 99, hello.self = 1;
  for (size_t i = 0; i < 16; ++i) hello.token[i] = uint8_t(std::stoi(address.substr(token_at + 2 * i, 2), nullptr, 16));
  std::string good, wrong_token, wrong_magic;
  append(good, hello);
  hello.token[15] ^= 1;
  append(wrong_token, hello);
  hello.token[15] ^= 1, hello.magic ^= 1;
  append(wrong_magic, hello);
  const auto tell = [&](const std::string& bytes, bool end = true) {
    return say(reinterpret_cast<const sockaddr*>(&at), sizeof at, SOCK_STREAM, bytes, end);
  };
  const size_t welcome = sizeof(TcpWelcome) + 2 * sizeof(TcpRange);

  int64_t refused = 0;
  CHECK(tell("") == "");
  CHECK(tell("x") == "");
  CHECK(tell(good.substr(0, 39)) == "");  // half of a hello: nothing to refuse
  CHECK(tell("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n        ") == "");
  door.wait_refused(++refused);
  CHECK(tell(wrong_token) == "");
  door.wait_refused(++refused);
  CHECK(tell(wrong_magic) == "");
  door.wait_refused(++refused);
  CHECK(tell(good).size() == welcome);
  CHECK(tell(good.substr(0, 20), false) == "");

  const auto frame = [&](auto change) {
    FrameHead head{.type = FrameType::write, .n_ranges = 1, .post = 1, .n_frames = 1, .window = door.key, .bytes = 64};
    TcpRange range{1, 64};
    change(head, range);
    std::string bytes = good;
    append(bytes, head);
    append(bytes, range);
    return bytes + std::string(64, 'x') + std::string(8, 's');
  };
  // Against the rules: the connection ends.
  for (const std::string& bytes :
       {frame([](FrameHead&h, TcpRange&) { h.magic = 0; }),
        frame([](FrameHead&h, TcpRange&) { h.type = FrameType(77); }),
        frame([](FrameHead&h, TcpRange&) { h.type = FrameType::data; }),
        frame([](FrameHead&h, TcpRange&) { h.type = FrameType::placed; }),
        frame([](FrameHead&h, TcpRange&) { h.n_ranges = 65535; }),
        frame([](FrameHead&h, TcpRange&) { h.bytes = uint32_t(1) << 31; }),
        frame([](FrameHead&h, TcpRange&) { h.bytes = 65; }), frame([](FrameHead&, TcpRange&r) { r.bytes = 0; }),
        frame([](FrameHead&, TcpRange&r) { r.bytes = UINT64_MAX; }), frame([](FrameHead&h, TcpRange&) { h.frame = 1; }),
        frame([](FrameHead&h, TcpRange&) { h.n_frames = 0; })}) {
    CHECK(tell(bytes).size() == welcome);
    door.wait_refused(++refused);
  }
  // Within the rules, but not allowed: read, dropped, answered.
  for (const std::string& bytes :
       {frame([](FrameHead&, TcpRange&) {}), frame([](FrameHead&, TcpRange&r) { r.address = UINT64_MAX - 10; }),
        frame([](FrameHead&h, TcpRange&) { h.window.secret ^= 1; }),
        frame([](FrameHead&h, TcpRange&) { h.window.generation += 1; })}) {
    CHECK(tell(bytes).size() == welcome + sizeof(FrameHead));
    door.wait_refused(++refused);
  }
  // A seal that is none: the bytes came, the post did not.
  const int arrived = door.owner->arrived(door.key);
  for (size_t cut : {size_t(41), size_t(88), size_t(104), size_t(130), size_t(170)})
    CHECK(tell(frame([](FrameHead&, TcpRange&) {}).substr(0, cut)).size() == welcome);
  CHECK(door.owner->arrived(door.key) == arrived);
  Random random(6);
  for (int round = 0; round < 200; ++round) {  // noise, with and without a hello
    std::string bytes = round % 2 ? good : "";
    for (uint64_t i = random.below(3000); i > 0; --i) bytes.push_back(char(random.next()));
    tell(bytes, round % 5 != 0);
  }
  door.still_works();
}

TEST_CASE("shm: garbage at its door is closed and counted", "[transport]") {
  Door door("shm");
  const std::string name = door.owner->address().substr(5);
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path + 1, name.data(), name.size());
  const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const auto tell = [&](const std::string& bytes, bool end = true) {
    return say(reinterpret_cast<const sockaddr*>(&at), length, SOCK_SEQPACKET, bytes, end);
  };
  int64_t refused = 0;
  CHECK(tell("") == "");
  for (const std::string& bytes : {std::string("x"), std::string(16, 'y'), std::string(5000, 'z')}) {
    CHECK(tell(bytes) == "");
    door.wait_refused(++refused);
  }
  Random random(6);
  for (int round = 0; round < 300; ++round) {
    std::string bytes;
    for (uint64_t i = 1 + random.below(40); i > 0; --i) bytes.push_back(char(random.next()));
    tell(bytes, round % 5 != 0);
  }
  door.still_works();
}

}  // namespace
}  // namespace xpyd::testing::wire_garbage_test
