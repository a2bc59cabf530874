// Handshakes, frames and their parts, as bytes without sockets.
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <iomanip>
#include <sstream>

#include "base/random.h"
#include "disagg/net/bytes.h"
#include "disagg/net/frames.h"
#include "disagg/net/hello.h"
#include "tests/catch.h"

namespace xpyd::testing::control_frame_test {

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

TEST_CASE("frames arrive as they were sent, however the bytes are cut", "[disagg][control]") {
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
      // A longer frame waits for its bytes. Its authentication code is wrong when they come.
      if (length <= kMaxFramePayloadBytes) changed.resize(length + 2 * kFrameOverheadBytes);
      FrameReader reader(kKey);
      Frames frames;
      Status status = feed(reader, changed, frames);
      CHECK(!status.ok());
      CHECK(frames.empty());
      CHECK(!feed(reader, first, frames).ok());  // the reader stays failed
    }
  // A frame under the key of another session.
  FrameWriter other(SipKey{1, 3});
  std::string foreign;
  other.append(foreign, 16, "first");
  CHECK(error_of(foreign).find("authentication") != std::string::npos);
}

TEST_CASE("a claimed length allocates no memory", "[disagg][control]") {
  uint32_t length = uint32_t(kMaxFramePayloadBytes) + 1;
  std::string bytes(kFrameHeaderBytes, '\0');
  std::memcpy(bytes.data(), &length, 4);
  CHECK(error_of(bytes).find("16777217 bytes; expected at most 16777216") != std::string::npos);
  --length;
  std::memcpy(bytes.data(), &length, 4);
  FrameReader reader(kKey);
  Frames frames;
  CHECK(feed(reader, bytes, frames).ok());
  CHECK(reader.buffered_bytes() == bytes.size());
}

struct Pair {
  ClusterKey key = ClusterKey::random();
  NodeIdentity conductor{"conductor", 77};
  NodeIdentity worker{"P0@host", 78};
};

// Carries bytes, `cut` at a time, until both sides are done or one has failed. Returns the error.
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

TEST_CASE("a handshake tells each side its peer and gives both the same keys", "[disagg][control]") {
  Pair pair;
  for (size_t cut : {1, 3, 1000}) {
    Handshake initiator(Handshake::Side::initiator, pair.key, pair.worker);
    Handshake acceptor(Handshake::Side::acceptor, pair.key, pair.conductor);
    REQUIRE(shake(initiator, acceptor, cut) == "");
    for (const auto& [seen, is] : {std::pair(initiator.peer(), pair.conductor), {acceptor.peer(), pair.worker}})
      CHECK((seen.id == is.id && seen.fingerprint == is.fingerprint));
    auto same = [](SipKey a, SipKey b) { return a.k0 == b.k0 && a.k1 == b.k1; };
    CHECK(same(initiator.send_key(), acceptor.receive_key()));
    CHECK(same(initiator.receive_key(), acceptor.send_key()));
    CHECK(!same(initiator.receive_key(), initiator.send_key()));
    Handshake again_i(Handshake::Side::initiator, pair.key, pair.worker);
    Handshake again_a(Handshake::Side::acceptor, pair.key, pair.conductor);
    REQUIRE(shake(again_i, again_a) == "");
    CHECK(!same(initiator.send_key(), again_i.send_key()));  // keys belong to a session, not to the cluster
  }
}

TEST_CASE("a handshake refuses another key, version or protocol, and a replay", "[disagg][control]") {
  Pair pair;
  const auto acceptor = [&] { return Handshake(Handshake::Side::acceptor, pair.key, pair.conductor); };
  for (const ClusterKey& key : {ClusterKey::random(), ClusterKey()}) {
    Handshake i(Handshake::Side::initiator, key, pair.worker), a = acceptor();
    CHECK(shake(i, a) == "acceptor: handshake: the peer has a different cluster key");
  }
  Handshake i(Handshake::Side::initiator, pair.key, pair.worker);
  std::string hello, out;
  std::string_view view;
  REQUIRE(i.feed(view, hello).ok());
  const auto changed = [&](size_t at, char to) { return hello.substr(0, at) + to + hello.substr(at + 1); };
  for (const auto& [bytes, says] :
       {std::pair<std::string, const char*>{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not speak"},
        {changed(10, 2), "the peer speaks version 2, but this is version 1"},
        {changed(hello.size() - 1, ' '), "printable"}}) {
    Handshake a = acceptor();
    view = bytes;
    const Status status = a.feed(view, out);
    REQUIRE(!status.ok());
    CHECK(out.empty());
    CHECK(status.error().message.find(says) != std::string::npos);
  }
  // The initiator's recorded bytes are sent again. The acceptor's nonce is another one now.
  Handshake a = acceptor(), again = acceptor();
  std::string recorded = hello;
  view = recorded;
  REQUIRE(a.feed(view, out).ok());
  view = out;
  REQUIRE(i.feed(view, recorded).ok());
  view = recorded;
  const Status status = again.feed(view, out);
  REQUIRE(!status.ok());
  CHECK(status.error().message == "handshake: the peer has a different cluster key");
}

// A peer without the key that mirrors all it receives cannot pass for a member.
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

TEST_CASE("a handshake takes at most 1 KiB and leaves the bytes that follow it", "[disagg][control]") {
  Pair pair;
  Random random(5);
  // A stranger sends any bytes for as long as it likes.
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
  // The initiator's proof and its first frame come in one packet.
  Handshake i(Handshake::Side::initiator, pair.key, pair.worker);
  Handshake a(Handshake::Side::acceptor, pair.key, pair.conductor);
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

std::string hex(const Sha256& digest) {
  std::ostringstream out;
  for (uint8_t byte : digest) out << std::hex << std::setw(2) << std::setfill('0') << int(byte);
  return out.str();
}

TEST_CASE("a ByteReader refuses a value that does not fit, and names the field", "[disagg][control]") {
  const auto count = [](uint32_t n, const std::string& rest) {
    ByteWriter writer;
    writer.number(n);
    return writer.take() + rest;
  };
  ByteWriter nan;
  nan.number(std::numeric_limits<float>::quiet_NaN());
  const struct {
    std::string bytes;
    void (*read)(ByteReader&);
    const char* says;
  } kRows[] = {
      {"abc", [](ByteReader& r) { CHECK(r.number<uint32_t>("x") == 0); }, "x: needs 4 bytes, 3 are left"},
      {"\2", [](ByteReader& r) { CHECK(!r.boolean("flag")); }, "flag: 2"},
      {"\x09", [](ByteReader& r) { r.number<uint8_t>("role", 0, 8); }, "role: 9; expected from 0 to 8"},
      // The largest count, with four bytes behind it, allocates nothing.
      {count(0xffffffff, "abcd"), [](ByteReader& r) { CHECK(r.numbers<int64_t>("ids", 0xffffffff).capacity() == 0); },
       "ids: 4294967295 elements in 4 bytes"},
      {count(3, "abc"), [](ByteReader& r) { r.text("name", 2); }, "name: 3 elements; expected at most 2"},
      {count(2, "\xc3\x28"), [](ByteReader& r) { CHECK(r.utf8("name", 9).empty()); }, "name: the text is not UTF-8"},
      {"ab", [](ByteReader& r) { r.number<uint8_t>("x"); }, "message: 1 bytes are left over"},
      {nan.bytes(), [](ByteReader& r) { r.number<float>("p", 0.0f, 1.0f); }, "p: "},
      // The first error stays, and later reads give zeros.
      {std::string(1, 5),
       [](ByteReader& r) {
         r.boolean("first");
         CHECK(r.number<uint64_t>("second") == 0);
         CHECK(r.text("third", 10).empty());
       },
       "first: "},
  };
  for (const auto& [bytes, read, says] : kRows) {
    ByteReader reader(bytes);
    read(reader);
    const Status status = reader.finish();
    INFO(says);
    REQUIRE(!status.ok());
    CHECK(status.error().message.find(says) == 0);
  }
}

// RFC 4231, sections 4.3, 4.4 and 4.7: a short key, one with long data, and one longer than a block.
TEST_CASE("HMAC-SHA256 agrees with RFC 4231", "[disagg][control]") {
  struct Row {
    std::string key, data, digest;
  };
  const Row rows[] = {
      {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
  };
  for (const Row& row : rows) {
    Sha256 digest = hmac_sha256(row.key, row.data);
    CHECK(hex(digest) == row.digest);
    Sha256 other = digest;
    CHECK(equal_in_constant_time(digest, other));
    other[31] ^= 1;
    CHECK(!equal_in_constant_time(digest, other));
  }
}

TEST_CASE("a cluster key comes from a file that others cannot read", "[disagg][control]") {
  TempDir dir;
  const std::string path = dir.path + "/key", good = "0123456789abcdef";
  const auto error = [&] {
    auto key = ClusterKey::from_file(path);
    return key ? "" : key.error().message;
  };
  CHECK(error().find("No such file") != std::string::npos);
  for (const auto& [text, mode, says] : {std::tuple<std::string, mode_t, const char*>{good + "\r\n\n", 0600, ""},
                                         {good, 0640, ""},
                                         {good, 0644, "mode"},
                                         {good, 0620, "mode"},
                                         {good.substr(1) + "\n", 0600, "15 bytes; expected at least 16"},
                                         {std::string(4097, 'k'), 0600, "more than 4096"}}) {
    INFO(mode << " " << says);
    std::ofstream(path, std::ios::binary) << text;
    REQUIRE(chmod(path.c_str(), mode) == 0);
    CHECK(error().find(says) != std::string::npos);
    CHECK((error() == "" || error().find(path) != std::string::npos));
    CHECK((error() == "") == (*says == 0));
    if (*says) continue;
    const ClusterKey key = ClusterKey::from_file(path).value();
    CHECK((key.bytes() == good && key.secret()));  // an editor's line end is not part of the key
  }
  REQUIRE(remove(path.c_str()) == 0);
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK(error().find("not a regular file") != std::string::npos);
  CHECK(ClusterKey::random().bytes() != ClusterKey::random().bytes());
  CHECK(!ClusterKey().secret());
}

}  // namespace xpyd::testing::control_frame_test
