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

// All devices that are up: two rails in the virtual machine of `make test-rdma`.
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
  message.window.ranges = {{4096, 100, {1, 2}}, {8192, 1, {3, 4}}};
  return message;
}

std::string body(const std::string& frame) { return frame.substr(4); }

TEST_CASE("rdma: addresses", "[rdma]") {
  const Address address{"10.0.0.1", 4711, 0xfeedu, {{0x1000, 0x200}, {0x7000, 1}}};
  auto parsed = parse_address(to_text(address));
  REQUIRE(parsed);
  CHECK(parsed.value().host == "10.0.0.1");
  CHECK(parsed.value().port == 4711);
  CHECK(parsed.value().token == 0xfeedu);
  REQUIRE(parsed.value().regions.size() == 2);
  CHECK(parsed.value().regions[1].base == 0x7000);
  CHECK(parsed.value().regions[1].bytes == 1);
  for (const char* wrong : {"", "rdma1", "rdma2,h,1,1", "rdma1,,1,1", "rdma1,h,0,1", "rdma1,h,65536,1", "rdma1,h,1,x",
                            "rdma1,h,1,", "rdma1,h,1,1,5", "rdma1,h,1,1,5+", "rdma1,h,1,1,+5", "rdma1,h,1,1,-1+5",
                            "rdma1,h,1,1,ffffffffffffffff+1", "rdma1,h,1,1,11111111111111111+1"}) {
    INFO(wrong);
    CHECK(!parse_address(wrong));
  }
}

TEST_CASE("rdma: messages come through whole or not at all", "[rdma]") {
  RailEnd end;
  end.mtu = 3, end.reads = 16, end.number = 0xabcdef, end.psn = 5, end.gid[3] = 9;
  const Hello hello{4, 0x1234567890abcdefu, {end, end}, "no room"};
  auto greeted = parse_hello(body(frame(hello)));
  REQUIRE(greeted);
  CHECK(greeted->from == 4);
  CHECK(greeted->token == hello.token);
  REQUIRE(greeted->rails.size() == 2);
  CHECK(greeted->rails[1].number == 0xabcdef);
  CHECK(greeted->rails[1].gid == end.gid);
  CHECK(greeted->refusal == "no room");

  auto told = parse_message(body(frame(opened())), 2);
  REQUIRE(told);
  CHECK(told->window.index == 7);
  CHECK(told->window.generation == 9);
  CHECK(told->window.op == KvOp::read);
  REQUIRE(told->window.ranges.size() == 2);
  CHECK(told->window.ranges[1].begin == 8192);
  CHECK(told->window.ranges[1].keys == std::vector<uint32_t>{3, 4});

  // Cut anywhere, or one byte longer, they are refused.
  for (const std::string& whole :
       {frame(opened()), frame(Message{Message::renew, {}, 1, {end}}), frame(Message{Message::sync, {}, 3, {}})}) {
    for (size_t n = 0; n + 4 < whole.size(); ++n) {
      auto part = parse_message(body(whole).substr(0, n), 2);
      // A list of ranges may end early and still be one.
      CHECK((!part || (part->kind == Message::opened && part->window.ranges.size() < 2)));
    }
    CHECK(!parse_message(body(whole) + "x", 2));
  }
  CHECK(!parse_message(body(frame(opened())), 3));
}

TEST_CASE("rdma: what cannot be is refused", "[rdma]") {
  auto refused = [](auto change) {
    Message message = opened();
    change(message.window);
    return !parse_message(body(frame(message)), 2);
  };
  CHECK(!refused([](WindowKeys&) {}));
  CHECK(refused([](WindowKeys& w) { w.generation = 0; }));
  CHECK(refused([](WindowKeys& w) { w.ranges[0].bytes = 0; }));
  CHECK(refused([](WindowKeys& w) { w.ranges[0].bytes = 5000; }));  // runs into the next
  CHECK(refused([](WindowKeys& w) { w.ranges[1].bytes = UINT64_MAX; }));
  CHECK(refused([](WindowKeys& w) { w.ranges.resize(kMaxKeys + 1, {9000, 1, {1, 2}}); }));
  Hello hello{1, 2, {RailEnd{}}, ""};
  CHECK(!parse_hello(body(frame(hello))));  // no MTU
  hello.rails[0].mtu = 3, hello.rails[0].reads = 1;
  CHECK(parse_hello(body(frame(hello))));
  hello.rails[0].number = 1u << 24;
  CHECK(!parse_hello(body(frame(hello))));
  hello.rails[0].number = 0;
  hello.rails.resize(kMaxRails + 1, hello.rails[0]);
  CHECK(!parse_hello(body(frame(hello))));
}

TEST_CASE("rdma: no bytes upset the parsers", "[rdma]") {
  Random random(11);
  const std::string samples[] = {body(frame(opened())), body(frame(Hello{1, 2, {RailEnd{}}, "x"})),
                                 body(frame(Message{Message::renewed, {}, 0, {RailEnd{}}}))};
  int parsed = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = samples[i % 3];
    for (uint64_t n = random.below(4); n > 0; --n) bytes[random.below(bytes.size())] = char(random.below(256));
    bytes.resize(random.below(2 * bytes.size()), char(random.below(256)));
    parsed += parse_message(bytes, random.below(3)).has_value() + parse_hello(bytes).has_value();
    (void)parse_address(bytes).ok();
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
