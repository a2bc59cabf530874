// Handshake and frames as bytes, without sockets.
#include <cstring>

#include "base/random.h"
#include "disagg/net/frames.h"
#include "disagg/net/hello.h"
#include "tests/catch.h"

namespace xpyd::testing::control_frame_test {
namespace {

const SipKey kKey{1, 2};

using Frames = std::vector<std::pair<int, std::string>>;

Status feed(FrameReader& reader, std::string_view bytes, Frames& frames) {
  return reader.feed(bytes, [&](uint16_t type, std::string_view payload) {
    frames.emplace_back(type, payload);
    return true;
  });
}

std::string error_of(std::string_view bytes) {
  FrameReader reader(kKey);
  Frames frames;
  Status status = feed(reader, bytes, frames);
  return status ? "" : status.error().message;
}

TEST_CASE("frames come out as they went in, however the bytes are cut", "[disagg][control]") {
  Frames sent{{16, ""}, {17, "a"}, {65535, std::string(70000, 'x')}, {16, std::string(1, '\0')}};
  FrameWriter writer(kKey);
  std::string bytes;
  for (auto& [type, payload] : sent) writer.append(bytes, uint16_t(type), payload);
  CHECK(bytes.size() == 70002 + 4 * kFrameOverheadBytes);
  for (size_t step : {size_t{1}, size_t{7}, size_t{24}, size_t{4096}, bytes.size()}) {
    FrameReader reader(kKey);
    Frames received;
    for (size_t at = 0; at < bytes.size(); at += step)
      REQUIRE(feed(reader, std::string_view(bytes).substr(at, step), received).ok());
    CHECK(received == sent);
    CHECK(reader.buffered_bytes() == 0);
  }
}

TEST_CASE("a frame that is changed, repeated, moved or left out is refused", "[disagg][control]") {
  FrameWriter writer(kKey);
  std::string first, second, third;
  writer.append(first, 16, "first");
  writer.append(second, 17, "second");
  writer.append(third, 18, "third");
  CHECK(error_of(first + second + third) == "");
  CHECK(error_of(first + first).find("frame 1: its sequence number is 0") == 0);
  CHECK(error_of(second).find("frame 0: its sequence number is 1") == 0);
  CHECK(error_of(first + third).find("frame 1: its sequence number is 2") == 0);
  for (size_t byte = 0; byte < first.size(); ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = first;
      changed[byte] = char(changed[byte] ^ (1 << bit));
      uint32_t length;
      std::memcpy(&length, changed.data(), 4);
      // A longer one waits for its bytes, and finds the code wrong when they come.
      if (length <= kMaxFramePayloadBytes) changed.resize(length + 2 * kFrameOverheadBytes);
      FrameReader reader(kKey);
      Frames frames;
      Status status = feed(reader, changed, frames);
      CHECK(!status.ok());
      CHECK(frames.empty());
      CHECK(!feed(reader, first, frames).ok());  // dead
    }
  // Under another session's key.
  FrameWriter other(SipKey{1, 3});
  std::string foreign;
  other.append(foreign, 16, "first");
  CHECK(error_of(foreign).find("authentication") != std::string::npos);
}

TEST_CASE("a claimed length allocates nothing", "[disagg][control]") {
  uint32_t length = uint32_t(kMaxFramePayloadBytes) + 1;
  std::string bytes(kFrameHeaderBytes, '\0');
  std::memcpy(bytes.data(), &length, 4);
  CHECK(error_of(bytes).find("16777217 bytes, at most 16777216") != std::string::npos);
  --length;
  std::memcpy(bytes.data(), &length, 4);
  FrameReader reader(kKey);
  Frames frames;
  CHECK(feed(reader, bytes, frames).ok());
  CHECK(reader.buffered_bytes() == bytes.size());
}

struct Pair {
  ClusterKey key = ClusterKey::random();
  NodeIdentity conductor{NodeRole::conductor, "conductor", 77};
  NodeIdentity worker{NodeRole::prefill, "P0@host", 78};
};

// Carries bytes until both are done or one has failed; `cut`: how many bytes at once.
std::string shake(Handshake& initiator, Handshake& acceptor, size_t cut = 1000) {
  std::string to_acceptor, to_initiator;
  std::string_view none;
  if (Status s = initiator.feed(none, to_acceptor); !s) return s.error().message;
  for (int turn = 0; turn < 10000; ++turn) {
    if (to_acceptor.empty() && to_initiator.empty()) break;
    std::string_view a = std::string_view(to_acceptor).substr(0, cut);
    size_t had = a.size();
    if (Status s = acceptor.feed(a, to_initiator); !s) return "acceptor: " + s.error().message;
    to_acceptor.erase(0, had - a.size());
    std::string_view i = std::string_view(to_initiator).substr(0, cut);
    had = i.size();
    std::string reply;
    if (Status s = initiator.feed(i, reply); !s) return "initiator: " + s.error().message;
    to_initiator.erase(0, had - i.size());
    to_acceptor += reply;
  }
  return initiator.done() && acceptor.done() ? "" : "not done";
}

TEST_CASE("a handshake tells both who is there and gives them the same keys", "[disagg][control]") {
  Pair pair;
  for (size_t cut : {1, 3, 1000}) {
    Handshake initiator(Handshake::Side::initiator, pair.key, pair.worker);
    Handshake acceptor(Handshake::Side::acceptor, pair.key, pair.conductor);
    REQUIRE(shake(initiator, acceptor, cut) == "");
    CHECK(initiator.peer().role == NodeRole::conductor);
    CHECK(initiator.peer().id == "conductor");
    CHECK(initiator.peer().fingerprint == 77);
    CHECK(acceptor.peer().role == NodeRole::prefill);
    CHECK(acceptor.peer().id == "P0@host");
    CHECK(acceptor.peer().fingerprint == 78);
    auto same = [](SipKey a, SipKey b) { return a.k0 == b.k0 && a.k1 == b.k1; };
    CHECK(same(initiator.send_key(), acceptor.receive_key()));
    CHECK(same(initiator.receive_key(), acceptor.send_key()));
    CHECK(!same(initiator.receive_key(), initiator.send_key()));
    Handshake again_i(Handshake::Side::initiator, pair.key, pair.worker);
    Handshake again_a(Handshake::Side::acceptor, pair.key, pair.conductor);
    REQUIRE(shake(again_i, again_a) == "");
    CHECK(!same(initiator.send_key(), again_i.send_key()));  // of the session, not of the cluster
  }
}

TEST_CASE("a handshake refuses another key, another version, another protocol and a replay", "[disagg][control]") {
  Pair pair;
  auto acceptor = [&](const ClusterKey& key) { return Handshake(Handshake::Side::acceptor, key, pair.conductor); };
  auto initiator = [&](const ClusterKey& key) { return Handshake(Handshake::Side::initiator, key, pair.worker); };
  {
    Handshake i = initiator(ClusterKey::random()), a = acceptor(pair.key);
    CHECK(shake(i, a) == "acceptor: handshake: the peer has another cluster key");
  }
  {
    Handshake i = initiator(ClusterKey()), a = acceptor(pair.key);
    CHECK(shake(i, a) == "acceptor: handshake: the peer has another cluster key");
  }
  auto first_words = [&](std::string bytes) {
    Handshake a = acceptor(pair.key);
    std::string out;
    std::string_view view = bytes;
    Status status = a.feed(view, out);
    CHECK(out.empty());
    return status ? "" : status.error().message;
  };
  CHECK(first_words("GET / HTTP/1.1\r\nHost: x\r\n\r\n").find("does not speak") != std::string::npos);
  std::string hello, none_out;
  {
    Handshake i = initiator(pair.key);
    std::string_view none;
    REQUIRE(i.feed(none, hello).ok());
  }
  std::string changed = hello;
  changed[10] = 2;
  CHECK(first_words(changed).find("the peer speaks version 2, this is version 1") != std::string::npos);
  changed = hello;
  changed[44] = 9;
  CHECK(first_words(changed).find("role: 9") != std::string::npos);
  changed = hello;
  changed.back() = ' ';
  CHECK(first_words(changed).find("printable") != std::string::npos);

  {
    NodeIdentity old = pair.worker;
    old.schema = 7;
    Handshake i(Handshake::Side::initiator, pair.key, old), a = acceptor(pair.key);
    CHECK(shake(i, a) == "acceptor: handshake: the peer is another build of this program, with other messages");
  }

  // What an initiator once said, said again: the acceptor's nonce is another now.
  std::string recorded, replies;
  {
    Handshake i = initiator(pair.key), a = acceptor(pair.key);
    std::string_view none;
    REQUIRE(i.feed(none, recorded).ok());
    std::string_view view = recorded;
    REQUIRE(a.feed(view, replies).ok());
    view = replies;
    REQUIRE(i.feed(view, recorded).ok());
  }
  Handshake a = acceptor(pair.key);
  std::string_view view = recorded;
  std::string out;
  Status status = a.feed(view, out);
  REQUIRE(!status.ok());
  CHECK(status.error().message == "handshake: the peer has another cluster key");
}

// A peer without the key that mirrors what it is told cannot pass for a member.
TEST_CASE("a handshake cannot be reflected", "[disagg][control]") {
  Pair pair;
  Handshake i(Handshake::Side::initiator, pair.key, pair.worker);
  std::string said;
  std::string_view none;
  REQUIRE(i.feed(none, said).ok());
  size_t heard = 0;
  Status status = ok();
  for (int turn = 0; turn < 3 && status; ++turn) {
    std::string mirror = said.substr(heard);
    heard = said.size();
    std::string_view view = mirror;
    status = i.feed(view, said);
  }
  CHECK(!status.ok());
  CHECK(!i.done());
}

TEST_CASE("a handshake takes at most 1 KiB and leaves what follows", "[disagg][control]") {
  Pair pair;
  Handshake a(Handshake::Side::acceptor, pair.key, pair.conductor);
  Random random(5);
  // Whatever a stranger says, for as long as it likes.
  for (int round = 0; round < 200; ++round) {
    Handshake target(Handshake::Side::acceptor, pair.key, pair.conductor);
    size_t taken = 0;
    Status status = ok();
    while (status && taken < 10000) {
      std::string bytes;
      uint16_t length = uint16_t(1 + random.below(256));
      bytes.append(reinterpret_cast<const char*>(&length), 2);
      for (int k = 0; k < length; ++k) bytes += char(random.below(256));
      std::string out;
      std::string_view view = bytes;
      status = target.feed(view, out);
      taken += bytes.size() - view.size();
    }
    CHECK(!status.ok());
    CHECK(taken <= kMaxHandshakeBytes + 258);
    CHECK(!target.done());
  }
  // The initiator's proof and its first frame in one packet.
  Handshake i(Handshake::Side::initiator, pair.key, pair.worker);
  std::string to_a, to_i;
  std::string_view none, view;
  REQUIRE(i.feed(none, to_a).ok());
  view = to_a;
  REQUIRE(a.feed(view, to_i).ok());
  to_a.clear();
  view = to_i;
  REQUIRE(i.feed(view, to_a).ok());
  to_a += "frame";
  view = to_a;
  to_i.clear();
  REQUIRE(a.feed(view, to_i).ok());
  CHECK(a.done());
  CHECK(view == "frame");
}

}  // namespace
}  // namespace xpyd::testing::control_frame_test
