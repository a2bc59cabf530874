// The nccl wire beside the suite (transport_test.cc, over functions of ours in NCCL's place): what
// it says where it cannot work, what comes from outside as bytes, how posts are cut, and links
// whose communicators break.

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/random.h"
#include "disagg/transport/nccl_link.h"
#include "disagg/transport/nccl_messages.h"
#include "disagg/transport/wires.h"
#include "tests/catch.h"
#include "tests/disagg/fake_nccl.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::nccl_test {
namespace {

using namespace nccl;
using nccl::Message;

constexpr size_t KiB = 1024, MiB = 1024 * KiB;
constexpr PeerId kPoster = 1, kOwner = 2;

const Wire& fake_wire() {
  for (const Wire& wire : wires())
    if (wire.name == "nccl") return wire;
  throw std::runtime_error("the suite has no nccl wire");
}

std::string body(const std::string& frame) { return frame.substr(4); }

// A SideCall to its end: there is somebody who answers, or hangs up.
Result<std::string> call_side(const std::string& host, uint16_t port, const std::string& frame, SideLimits limits,
                              std::shared_ptr<SideChannel>& channel) {
  auto call = SideCall::begin(host, port, frame, limits);
  if (!call) return call.error();
  channel = call.value().channel();
  for (;; sched_yield()) {
    auto answer = call.value().answer();
    if (!answer) return answer.error();
    if (answer.value()) return *std::move(answer).value();
  }
}

TEST_CASE("nccl: over memory of the host it is refused, with what it takes", "[nccl]") {
  RealClock clock;
  const TransportOptions options{.queue = &cpu_queue(), .clock = &clock};
  const TransportRow* row = find_transport("nccl");
  REQUIRE(row);
  CHECK(row->leaves_process);
  auto made = row->make(options);
  REQUIRE(!made);
  CHECK(made.error().code == ErrorCode::unavailable);
  CHECK(made.error().message.find("--device cuda") != std::string::npos);
  CHECK(made.error().message.find("CUDA=1") != std::string::npos);
}

TEST_CASE("nccl: a library that is not there, or is none, is named", "[nccl]") {
  auto none = load_nccl("libnccl-of-nobody.so.2");
  REQUIRE(!none);
  CHECK(none.error().code == ErrorCode::unavailable);
  CHECK(none.error().message.find("libnccl-of-nobody.so.2") != std::string::npos);
  CHECK(none.error().message.find("install libnccl2") != std::string::npos);
  auto other = load_nccl("libc.so.6");
  REQUIRE(!other);
  CHECK(other.error().message.find("ncclCommInitRankConfig") != std::string::npos);
  auto here = load_nccl();
  CHECK((here ? here.value()->version >= kNcclOldest : here.error().message.find("libnccl.so.2") != std::string::npos));
}

Message some_ask() {
  Message message{.kind = Message::ask, .seq = 77};
  message.asked = {5, 1, 3, 6, {7, 9, 0x1234567890abcdefu}, KvOp::read, {{4096, 100}, {8192, 1}}};
  return message;
}

TEST_CASE("nccl: messages come through whole or not at all", "[nccl]") {
  Hello hello{.from = 4, .token = 0xfeedfacecafebeefu};
  hello.id.internal[0] = 'x', hello.id.internal[127] = 'y';
  hello.refusal = "no room";
  auto greeted = parse_hello(body(frame(hello)));
  REQUIRE(greeted);
  CHECK(greeted->from == 4);
  CHECK(greeted->token == hello.token);
  CHECK(std::memcmp(greeted->id.internal, hello.id.internal, 128) == 0);
  CHECK(greeted->refusal == "no room");

  const std::string asked = body(frame(some_ask()));
  auto ask = parse_message(asked);
  REQUIRE(ask);
  CHECK(ask->seq == 77);
  CHECK(ask->asked.post == 5);
  CHECK(ask->asked.group == 1);
  CHECK(ask->asked.n_groups == 3);
  CHECK(ask->asked.window == WindowKey{7, 9, 0x1234567890abcdefu});
  CHECK(ask->asked.op == KvOp::read);
  CHECK(ask->asked.ranges == some_ask().asked.ranges);
  for (size_t n = 0; n < asked.size(); ++n)  // 16 and 32 fewer are asks of fewer ranges
    CHECK(bool(parse_message(asked.substr(0, n))) == (n + 16 == asked.size() || n + 32 == asked.size()));
  CHECK(!parse_message(asked + "x"));
  for (auto kind : {Message::accepted, Message::refused, Message::go, Message::drop, Message::placed, Message::lost,
                    Message::renew}) {
    const std::string text = body(frame(Message{.kind = kind, .seq = 3}));
    auto message = parse_message(text);
    REQUIRE(message);
    CHECK(message->kind == kind);
    CHECK(message->seq == 3);
    for (size_t n = 0; n < text.size(); ++n) CHECK(!parse_message(text.substr(0, n)));
    CHECK(!parse_message(text + "x"));
  }
}

TEST_CASE("nccl: asks that no poster makes are refused", "[nccl]") {
  const auto parses = [](auto change) {
    Message message = some_ask();
    change(message.asked);
    return bool(parse_message(body(frame(message))));
  };
  CHECK(parses([](Ask&) {}));
  CHECK(parses([](Ask& a) { a.ranges.clear(); }));
  CHECK(parses([](Ask& a) { a.ranges = {{0, kGroupBytes}}; }));
  CHECK(!parses([](Ask& a) { a.ranges = {{0, kGroupBytes}, {0, 1}}; }));
  CHECK(!parses([](Ask& a) { a.ranges = {{0, UINT64_MAX}}; }));
  CHECK(!parses([](Ask& a) { a.ranges = {{UINT64_MAX - 5, 10}}; }));
  CHECK(!parses([](Ask& a) { a.ranges = {{100, 0}}; }));
  CHECK(parses([](Ask& a) { a.ranges.assign(kGroupParts, {1, 1}); }));
  CHECK(!parses([](Ask& a) { a.ranges.assign(kGroupParts + 1, {1, 1}); }));
  CHECK(!parses([](Ask& a) { a.group = a.n_groups; }));
  CHECK(!parses([](Ask& a) { a.op = KvOp(2); }));
}

TEST_CASE("nccl: a post is cut into groups that NCCL takes", "[nccl]") {
  auto* from = reinterpret_cast<std::byte*>(size_t(1) << 40);
  auto* to = reinterpret_cast<std::byte*>(size_t(1) << 41);
  const auto cut = [](const std::vector<Copy>& copies) { return nccl::Post(1, {}, copies).groups; };
  CHECK(cut({}).size() == 1);
  CHECK(cut({{from, to, 0}})[0].empty());
  // Neighbours on both sides are one call, on one side only they are two.
  auto joined = cut({{from, to, 10}, {from + 10, to + 10, 5}, {from + 15, to + 16, 1}});
  REQUIRE(joined.size() == 1);
  REQUIRE(joined[0].size() == 2);
  CHECK(joined[0][0].bytes == 15);
  Random random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<Copy> copies;
    size_t at = 0, total = 0;
    for (uint64_t n = random.below(1000); n > 0; --n) {
      const size_t bytes = random.below(random.below(20) ? 9000 : 9 * MiB);
      copies.push_back({from + at, to + 2 * at, bytes});
      at += bytes + 1, total += bytes;
    }
    size_t moved = 0;
    std::vector<Copy> flat;
    for (const auto& group : cut(copies)) {
      size_t bytes = 0;
      for (const Copy& copy : group) bytes += copy.bytes, flat.push_back(copy);
      CHECK(group.size() <= kGroupParts);
      CHECK(bytes <= kGroupBytes);
      moved += bytes;
    }
    CHECK(moved == total);
    size_t piece = 0;
    for (const Copy& copy : copies)
      for (size_t done = 0; done < copy.bytes; done += flat[piece++].bytes) {
        REQUIRE(piece < flat.size());
        REQUIRE(flat[piece].source == copy.source + done);
        REQUIRE(flat[piece].destination == copy.destination + done);
        REQUIRE(flat[piece].bytes <= copy.bytes - done);
      }
    CHECK(piece == flat.size());
  }
}

TEST_CASE("nccl: a communicator that cannot be made is why there is no connection", "[nccl]") {
  auto poster = make_side_here(fake_wire(), kPoster), owner = make_side_here(fake_wire(), kOwner);
  fail_fake_joins(true);
  const std::string why = poster->connect(kOwner, owner->address());
  fail_fake_joins(false);
  INFO(why);
  CHECK(why.find("invalid usage") != std::string::npos);
  CHECK(why.find("NCCL_HOSTID") != std::string::npos);
  CHECK(poster->connect(kOwner, owner->address()) == "");
}

TEST_CASE("nccl: a transport has ended when NCCL has given back what was aborted", "[nccl]") {
  {
    auto poster = make_side_here(fake_wire(), kPoster), owner = make_side_here(fake_wire(), kOwner);
    REQUIRE(poster->connect(kOwner, owner->address()) == "");
    REQUIRE(owner->connect(kPoster, poster->address()) == "");
  }
  CHECK(fake_reclaims() == 0);
}

TEST_CASE("nccl: a communicator that breaks is replaced", "[nccl]") {
  auto poster = make_side_here(fake_wire(), kPoster), owner = make_side_here(fake_wire(), kOwner);
  REQUIRE(poster->connect(kOwner, owner->address()) == "");
  REQUIRE(owner->connect(kPoster, poster->address()) == "");
  int failed = 0;
  for (int round = 0; round < 8; ++round) {
    const KvOp op = KvOp(round % 2);
    const WindowKey key = owner->open(kPoster, op, {{0, 16 * MiB}});
    const int made = fake_comms_made();
    owner->fill(0, 16 * MiB, 2);
    poster->fill(0, 16 * MiB, 1);
    std::vector<TransferId> ids;
    for (size_t i = 0; i < 4; ++i)
      ids.push_back(poster->post({kOwner, op, key, 0}, {{i * 4 * MiB, i * 4 * MiB, 4 * MiB}}));
    while (owner->arrived(key) < 1) sched_yield();
    break_fake_comms();
    int done = 0, whole = 0;
    for (TransferId id : ids) done += settle(*poster, id) == TransferState::done;
    failed += 4 - done;
    const int arrived = owner->arrived(key);
    for (size_t i = 0; i < 4; ++i)
      whole += op == KvOp::write ? owner->differing(i * 4 * MiB, 4 * MiB, 1, i * 4 * MiB) == 0
                                 : poster->differing(i * 4 * MiB, 4 * MiB, 2, i * 4 * MiB) == 0;
    CHECK(done <= arrived);
    CHECK(done <= whole);
    if (op == KvOp::write) CHECK(arrived <= whole);
    close_for_good(*owner, key);
    poster->fill(0, MiB, 1);
    owner->fill(0, MiB, 2);
    const WindowKey next = owner->open(kPoster, KvOp::write, {{0, MiB}});
    // Where the error is seen first by this post, it fails; the next one has a new communicator.
    TransferState state = TransferState::failed;
    for (int i = 0; i < 100 && state != TransferState::done; ++i)
      state = settle(*poster, poster->post({kOwner, KvOp::write, next, 0}, {{0, 0, MiB}}));
    CHECK(state == TransferState::done);
    CHECK(owner->differing(0, MiB, 1) == 0);
    CHECK(fake_comms_made() >= made + 2);
    close_for_good(*owner, next);
  }
  CHECK(failed > 0);
}

// The owner says that such a group is lost, though both ends run it whole.
TEST_CASE("nccl: a window that is closed while groups run breaks no communicator", "[nccl]") {
  auto poster = make_side_here(fake_wire(), kPoster), owner = make_side_here(fake_wire(), kOwner);
  REQUIRE(poster->connect(kOwner, owner->address()) == "");
  REQUIRE(owner->connect(kPoster, poster->address()) == "");
  const int made = fake_comms_made();
  int failed = 0;
  for (int round = 0; round < 100; ++round) {
    const KvOp op = KvOp(round % 2);
    const WindowKey key = owner->open(kPoster, op, {{0, 16 * MiB}});
    std::vector<TransferId> ids;
    for (size_t i = 0; i < 4; ++i)
      ids.push_back(poster->post({kOwner, op, key, 0}, {{i * 4 * MiB, i * 4 * MiB, 4 * MiB}}));
    while (owner->arrived(key) < 1 + round % 3) sched_yield();
    close_for_good(*owner, key);
    for (TransferId id : ids) failed += settle(*poster, id) == TransferState::failed;
  }
  CHECK(failed > 0);
  CHECK(fake_comms_made() == made);
}

// Both ends have enqueued their halves, and one of them stands still: what was given up is broken
// off, and the link goes on with another communicator when the peer does.
TEST_CASE("nccl: an owner that is stopped in the middle of a group", "[nccl]") {
  auto poster = make_side_here(fake_wire(), kPoster), owner = make_side_there(fake_wire(), kOwner);
  REQUIRE(poster->connect(kOwner, owner->address()) == "");
  REQUIRE(owner->connect(kPoster, poster->address()) == "");
  poster->fill(0, 16 * MiB, 1);
  const WindowKey key = owner->open(kPoster, KvOp::write, {{0, 16 * MiB}});
  std::vector<TransferId> ids;
  for (int i = 0; i < 8; ++i) ids.push_back(poster->post({kOwner, KvOp::write, key, 0}, {{0, 0, 16 * MiB}}));
  while (owner->arrived(key) < 1) sched_yield();
  REQUIRE(kill(owner->pid(), SIGSTOP) == 0);
  int status;
  REQUIRE(waitpid(owner->pid(), &status, WUNTRACED) == owner->pid());
  for (TransferId id : ids) poster->cancel(id);
  int failed = 0;
  for (TransferId id : ids) failed += settle(*poster, id) == TransferState::failed;
  CHECK(failed > 0);
  // Given up while the next communicator waits for the owner.
  const TransferId early = poster->post({kOwner, KvOp::write, key, 0}, {{0, 0, MiB}});
  poster->cancel(early);
  CHECK(settle(*poster, early) == TransferState::failed);
  REQUIRE(kill(owner->pid(), SIGCONT) == 0);
  close_for_good(*owner, key);
  owner->fill(0, 16 * MiB, 2);
  const WindowKey next = owner->open(kPoster, KvOp::write, {{0, MiB}});
  CHECK(settle(*poster, poster->post({kOwner, KvOp::write, next, 0}, {{0, 0, MiB}})) == TransferState::done);
  CHECK(owner->differing(0, MiB, 1) == 0);
  CHECK(owner->differing(MiB, 15 * MiB, 2, MiB) == 0);
}

// Seconds until a long message has come to one that begins to read it late, over a new channel.
double seconds_of_long_message() {
  std::shared_ptr<SideChannel> caller;
  std::atomic<size_t> got = 0;
  constexpr SideLimits kLimits{.hello = 64, .frame = 4 * MiB};
  const auto whole = [](size_t bytes) {
    std::string text(4 + bytes, 'x');
    for (int i = 0; i < 4; ++i) text[size_t(i)] = char(bytes >> (8 * i));
    return text;
  };
  SideChannels there(kLimits, [&](const std::shared_ptr<SideChannel>& channel) {
    channel->frame = [&, weak = std::weak_ptr(channel)](std::string_view text) {
      auto self = weak.lock();
      if (!std::exchange(self->trusted, true)) self->send(whole(1));
      if (text.size() == 2) usleep(100000);  // the socket fills
      got += text.size();
      return true;
    };
    channel->left = [] {};
  });
  SideChannels here(kLimits, {});
  REQUIRE(there.listen("127.0.0.1").ok());
  there.start();
  here.start();
  REQUIRE(call_side(there.host(), there.port(), whole(1), kLimits, caller).ok());
  caller->trusted = true;
  caller->frame = [](std::string_view) { return true; };
  caller->left = [] {};
  here.add(caller);
  usleep(50000);  // the thread sleeps in poll
  RealClock clock;
  const double start = clock.now();
  caller->send(whole(2));
  usleep(10000);
  caller->send(whole(4 * MiB - 64));
  while (got < 4 * MiB - 61 && clock.now() < start + 10) usleep(100);
  CHECK(got == 4 * MiB - 61);
  here.stop();
  there.stop();
  return clock.now() - start;
}

TEST_CASE("side channel: a long message from another thread is not held up", "[nccl]") {
  // Held up, each takes until the next look, a second; otherwise one in twenty is at once even
  // where the machine is busy.
  int tries = 0;
  while (seconds_of_long_message() > 0.5 && tries < 20) ++tries;
  CHECK(tries < 20);
}

// A peer that knows the token and then says anything at all: refused, and no byte moves.
TEST_CASE("nccl: a peer that talks nonsense is hung up on", "[nccl]") {
  auto owner = make_side_here(fake_wire(), kOwner), poster = make_side_here(fake_wire(), kPoster);
  REQUIRE(poster->connect(kOwner, owner->address()) == "");
  REQUIRE(owner->connect(kPoster, poster->address()) == "");
  owner->fill(0, kSideBytes, 2);
  const WindowKey key = owner->open(kPoster, KvOp::write, {{0, MiB}});
  const auto address = parse_side_address("nccl1", owner->address()).value();
  const auto call = [&](const Hello& hello, std::shared_ptr<SideChannel>& channel) {
    return call_side(address.host, address.port, frame(hello), kSideLimits, channel);
  };
  std::shared_ptr<SideChannel> stranger;
  CHECK(!call({.from = 7, .token = address.token + 1}, stranger));
  Random random(9);
  for (int round = 0; round < 60; ++round) {
    Hello hello{.from = 7, .token = address.token};
    REQUIRE(fake_nccl().get_unique_id(&hello.id) == kNcclSuccess);
    std::shared_ptr<SideChannel> channel;
    auto answer = call(hello, channel);
    REQUIRE(answer);
    Message message{.kind = Message::Kind(2 + random.below(8)), .seq = random.below(3)};
    message.asked = some_ask().asked;
    message.asked.window = key;  // stolen: it is another peer's
    message.asked.op = KvOp::write;
    message.asked.ranges = {{address.regions[0].base, 4096}};
    std::string bytes = frame(message);
    for (uint64_t n = random.below(4); n > 0; --n) bytes[random.below(bytes.size())] = char(random.below(256));
    channel->send(bytes);
    channel->end();
  }
  CHECK(owner->arrived(key) == 0);
  CHECK(owner->differing(0, kSideBytes, 2) == 0);
  poster->fill(0, MiB, 1);
  CHECK(settle(*poster, poster->post({kOwner, KvOp::write, key, 0}, {{0, 0, MiB}})) == TransferState::done);
  CHECK(owner->differing(0, MiB, 1) == 0);
  close_for_good(*owner, key);
}

}  // namespace
}  // namespace xpyd::testing::nccl_test
