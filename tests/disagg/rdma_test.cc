// The rdma wire: the suite (transport_test.cc) over it where there is a device, with either kind of
// keys; and everywhere what comes from outside as bytes, and what is said where there is no device.
#include <unistd.h>

#include <filesystem>

#include "base/random.h"
#include "disagg/transport/rdma_messages.h"
#include "disagg/transport/rdma_verbs.h"
#include "disagg/transport/wires.h"
#include "tests/catch.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::rdma_test {
namespace {

using namespace rdma;
using rdma::Message;

std::shared_ptr<std::byte> plain_memory(size_t bytes) { return cpu_device().allocate(bytes).value(); }

std::string missing() {
  auto memory = plain_memory(1 << 20);
  RealClock clock;
  TransportOptions options;
  options.regions.push_back({memory.get(), 1 << 20});
  options.clock = &clock;
  auto made = make_rdma_transport(options);
  return made ? "" : made.error().message;
}

// All devices that are up: two rails in the virtual machine of `make check STAGE=rdma`.
const RegisterWire rdma_wire({.name = "rdma",
                              .make = [](const TransportOptions& options) { return make_rdma_transport(options); },
                              .memory = plain_memory,
                              .needs_owner = false,
                              .missing = missing});

// As on a device without memory windows.
const RegisterWire registrations_wire(
    {.name = "rdma by registrations",
     .make = [](const TransportOptions& options) { return make_rdma_transport(options, Keys::registrations); },
     .memory = plain_memory,
     .needs_owner = false,
     .missing = missing});

Message opened() {
  Message message{Message::opened, {7, 9, KvOp::read, {}}, 0, {}};
  message.window.ranges = {{4096, 100}, {8192, 1}};
  message.window.keys = {1, 2, 3, 4};
  return message;
}

TEST_CASE("rdma: addresses", "[rdma]") {
  const std::string token = "00112233445566778899aabbccddeeff", address = "rdma,10.0.0.1,4711," + token;
  const WireAddress there{"10.0.0.1", 4711, token, {{0x1000, 0x200}, {0x7000, 1}}};
  CHECK(to_text("rdma", there) == address + ",1000+200,7000+1");
  auto parsed = parse_wire_address("rdma", to_text("rdma", there));
  REQUIRE(parsed);
  CHECK(parsed.value() == there);
  CHECK(parse_wire_address("rdma", address));
  for (const std::string& wrong :
       {std::string(), std::string("rdma"), "tcp,h,1," + token, "rdma,,1," + token, "rdma,h,0," + token,
        "rdma,h,65536," + token, std::string("rdma,h,1,x"), std::string("rdma,h,1,"), "rdma,h,1," + token + "0",
        "rdma,h,1,G" + token.substr(1), address + ",5", address + ",5+", address + ",+5", address + ",-1+5",
        address + ",ffffffffffffffff+1", address + ",11111111111111111+1"}) {
    INFO(wrong);
    CHECK(!parse_wire_address("rdma", wrong));
  }
}

TEST_CASE("rdma: messages come through whole or not at all", "[rdma]") {
  RailEnd end;
  end.mtu = 3, end.reads = 16, end.number = 0xabcdef, end.psn = 5, end.gid[3] = 9;
  const Offer offer{{end, end}, "no room"};
  const auto greeted = from_bytes<Offer>(to_bytes(offer));
  REQUIRE(greeted);
  REQUIRE(greeted.value().rails.size() == 2);
  CHECK(greeted.value().rails[1].number == 0xabcdef);
  CHECK(greeted.value().rails[1].gid == end.gid);
  CHECK(greeted.value().refusal == "no room");

  const auto read = read_message(to_bytes(opened()), 2);
  REQUIRE(read);
  const Message* told = &read.value();
  CHECK(told->window.index == 7);
  CHECK(told->window.generation == 9);
  CHECK(told->window.op == KvOp::read);
  REQUIRE(told->window.ranges.size() == 2);
  CHECK(told->window.ranges[1].begin == 8192);
  CHECK((told->window.key(1, 0) == 3 && told->window.key(1, 1) == 4));

  // Cut anywhere, or one byte longer, they are refused.
  for (const std::string& whole : {to_bytes(opened()), to_bytes(Message{Message::renew, {}, 1, {end}}),
                                   to_bytes(Message{Message::sync, {}, 3, {}})}) {
    for (size_t n = 0; n < whole.size(); ++n) CHECK(!read_message(whole.substr(0, n), 2));
    CHECK(!read_message(whole + "x", 2));
  }
  CHECK(!read_message(to_bytes(opened()), 3));
}

TEST_CASE("rdma: what cannot be is refused", "[rdma]") {
  auto refused = [](auto change) {
    Message message = opened();
    change(message.window);
    return !read_message(to_bytes(message), 2);
  };
  CHECK(!refused([](WindowKeys&) {}));
  CHECK(refused([](WindowKeys& w) { w.generation = 0; }));
  CHECK(refused([](WindowKeys& w) { w.ranges[0].bytes = 0; }));
  CHECK(refused([](WindowKeys& w) { w.ranges[0].bytes = 5000; }));  // runs into the next
  CHECK(refused([](WindowKeys& w) { w.ranges[1].bytes = UINT64_MAX; }));
  Message closed = opened();
  closed.kind = Message::closed;
  CHECK(!read_message(to_bytes(closed), 2));
  Offer offer{{RailEnd{}}, ""};
  CHECK(!from_bytes<Offer>(to_bytes(offer)));  // no MTU
  offer.rails[0].mtu = 3, offer.rails[0].reads = 1;
  CHECK(from_bytes<Offer>(to_bytes(offer)));
  offer.rails[0].number = 1u << 24;
  CHECK(!from_bytes<Offer>(to_bytes(offer)));
  // More than there may be, which no writer writes.
  offer.rails[0].number = 0;
  ByteWriter rails;
  rails.count(kMaxRails + 1);
  for (size_t i = 0; i <= kMaxRails; ++i) rails.raw(to_bytes(offer.rails[0]));
  rails.text("");
  CHECK(from_bytes<Offer>(rails.bytes()).error().message.find("rails: 17 elements") == 0);
}

TEST_CASE("rdma: no bytes upset the parsers", "[rdma]") {
  Random random(11);
  const std::string samples[] = {to_bytes(opened()), to_bytes(Offer{{RailEnd{}}, "x"}),
                                 to_bytes(Message{Message::renewed, {}, 0, {RailEnd{}}})};
  int parsed = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = samples[i % 3];
    for (uint64_t n = random.below(4); n > 0; --n) bytes[random.below(bytes.size())] = char(random.below(256));
    bytes.resize(random.below(2 * bytes.size()), char(random.below(256)));
    parsed += read_message(bytes, random.below(3)).ok() + from_bytes<Offer>(bytes).ok();
    (void)parse_wire_address("rdma", bytes).ok();
  }
  CHECK(parsed > 0);
}

TEST_CASE("rdma: ports are named, and what is not there is said", "[rdma]") {
  auto memory = plain_memory(1 << 20);
  RealClock clock;
  TransportOptions options;
  options.regions.push_back({memory.get(), 1 << 20});
  options.clock = &clock;
  options.nics = {"no_such_card:1"};
  auto made = make_rdma_transport(options);
  REQUIRE(!made);
  const bool here = std::filesystem::exists("/sys/class/infiniband") &&
                    !std::filesystem::is_empty("/sys/class/infiniband");
  INFO(made.error().message);
  CHECK(made.error().message.find(here ? "no_such_card:1" : "no RDMA device") != std::string::npos);
}

}  // namespace
}  // namespace xpyd::testing::rdma_test
