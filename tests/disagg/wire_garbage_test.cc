// What comes to a wire's door from those who are no peers: closed, counted, and nobody else notices.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "base/random.h"
#include "disagg/net/hello.h"
#include "disagg/transport/meeting.h"
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

// Sends, says that no more will come, and reads until the other side closes; what it said. A `hello` goes before: what
// is sent then comes from one who is let in, if the key is right.
std::string say(const sockaddr* address, socklen_t length, Handshake* hello, const std::string& bytes,
                bool end = true) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(connect(fd, address, length) == 0);
  std::string heard, out;
  std::string_view none;
  if (hello) REQUIRE(hello->feed(none, out).ok());
  while (hello && !hello->done()) {
    char buffer[1024];
    if (send(fd, out.data(), out.size(), MSG_NOSIGNAL) < 0) break;
    const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
    if (n <= 0) break;
    std::string_view more(buffer, size_t(n));
    out.clear();
    if (!hello->feed(more, out)) break;
    heard += more;
  }
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
  const auto address = parse_wire_address("tcp", door.owner->address()).value();
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(address.port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  using namespace tcp;
  const auto tell = [&](const std::string& bytes, bool end = true) {
    return say(reinterpret_cast<const sockaddr*>(&at), sizeof at, nullptr, bytes, end);
  };
  const auto hello_of = [](const std::string& token, const std::string& id, uint64_t version) {
    return Handshake(Handshake::Side::initiator, ClusterKey::of(token), {NodeRole::wire, id, 99, version});
  };
  const auto tell_after = [&](Handshake hello, const std::string& bytes, bool end = true) {
    return say(reinterpret_cast<const sockaddr*>(&at), sizeof at, &hello, bytes, end);
  };
  const auto tell_let_in = [&](const std::string& bytes, bool end = true) {
    return tell_after(hello_of(address.token, "1", kTcpVersion), bytes, end);
  };
  std::string said;
  {
    Handshake hello = hello_of(address.token, "1", kTcpVersion);
    std::string_view none;
    REQUIRE(hello.feed(none, said).ok());
  }
  std::string wrong_magic = said, wrong_token = address.token;
  wrong_magic[2] ^= 1, wrong_token[31] = wrong_token[31] == '0' ? '1' : '0';

  int64_t refused = 0;
  CHECK(tell("") == "");
  CHECK(tell("x") == "");
  CHECK(tell(said.substr(0, 39)) == "");  // half of a hello: nothing to refuse
  CHECK(tell("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n        ") == "");
  door.wait_refused(++refused);
  CHECK(tell_after(hello_of(wrong_token, "1", kTcpVersion), "") == "");
  door.wait_refused(++refused);
  CHECK(tell(wrong_magic) == "");
  door.wait_refused(++refused);
  CHECK(tell_after(hello_of(address.token, "1", kTcpVersion + 1), "") == "");
  door.wait_refused(++refused);
  tell_after(hello_of(address.token, "one", kTcpVersion), "");  // a name that no instance has
  CHECK(tell_let_in("") == "");
  CHECK(tell(said.substr(0, 20), false) == "");

  const auto frame = [&](auto change) {
    FrameHead head{.type = FrameType::write, .n_ranges = 1, .post = 1, .n_frames = 1, .window = door.key, .bytes = 64};
    AddressRange range{1, 64};
    change(head, range);
    std::string bytes;
    append(bytes, head);
    append(bytes, range);
    return bytes + std::string(64, 'x') + std::string(8, 's');
  };
  // Against the rules: the connection ends.
  for (const std::string& bytes :
       {frame([](FrameHead&h, AddressRange&) { h.magic = 0; }),
        frame([](FrameHead&h, AddressRange&) { h.type = FrameType(77); }),
        frame([](FrameHead&h, AddressRange&) { h.type = FrameType::data; }),
        frame([](FrameHead&h, AddressRange&) { h.type = FrameType::placed; }),
        frame([](FrameHead&h, AddressRange&) { h.n_ranges = 65535; }),
        frame([](FrameHead&h, AddressRange&) { h.bytes = uint32_t(1) << 31; }),
        frame([](FrameHead&h, AddressRange&) { h.bytes = 65; }), frame([](FrameHead&, AddressRange&r) { r.bytes = 0; }),
        frame([](FrameHead&, AddressRange&r) { r.bytes = UINT64_MAX; }),
        frame([](FrameHead&h, AddressRange&) { h.frame = 1; }),
        frame([](FrameHead&h, AddressRange&) { h.n_frames = 0; })}) {
    CHECK(tell_let_in(bytes) == "");
    door.wait_refused(++refused);
  }
  // Within the rules, but not allowed: read, dropped, answered.
  for (const std::string& bytes :
       {frame([](FrameHead&, AddressRange&) {}), frame([](FrameHead&, AddressRange&r) { r.begin = UINT64_MAX - 10; }),
        frame([](FrameHead&h, AddressRange&) { h.window.secret ^= 1; }),
        frame([](FrameHead&h, AddressRange&) { h.window.generation += 1; })}) {
    CHECK(tell_let_in(bytes).size() == sizeof(FrameHead));
    door.wait_refused(++refused);
  }
  // A post of two frames that are refused does not arrive with the last one.
  const int arrived = door.owner->arrived(door.key);
  const auto part = [&](uint32_t number) {
    return frame([&](FrameHead& h, AddressRange&) { h.frame = number, h.n_frames = 2; });
  };
  CHECK(tell_let_in(part(0) + part(1)).size() == 2 * sizeof(FrameHead));
  door.wait_refused(refused += 2);
  CHECK(door.owner->arrived(door.key) == arrived);
  // A seal that is none: the bytes came, the post did not.
  for (size_t cut : {size_t(1), size_t(48), size_t(64), size_t(90), size_t(130)})
    CHECK(tell_let_in(frame([](FrameHead&, AddressRange&) {}).substr(0, cut)) == "");
  CHECK(door.owner->arrived(door.key) == arrived);
  Random random(6);
  for (int round = 0; round < 200; ++round) {  // noise, with and without a hello
    std::string bytes;
    for (uint64_t i = random.below(3000); i > 0; --i) bytes.push_back(char(random.next()));
    round % 2 ? tell_let_in(bytes, round % 5 != 0) : tell(bytes, round % 5 != 0);
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
    return say(reinterpret_cast<const sockaddr*>(&at), length, nullptr, bytes, end);
  };
  int64_t refused = 0;
  CHECK(tell("") == "");
  CHECK(tell("x") == "");  // the beginning of a hello: nothing to refuse
  for (const std::string& bytes : {std::string(16, 'y'), std::string(5000, 'z')}) {
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
