// The nccl transport beside the suite (transport_test.cc, over fake_nccl.h): its errors where it cannot work, bytes
// from outside, how transfers are cut into groups, and communicators that break.


#include <cstring>

#include "base/random.h"
#include "disagg/transport/nccl/nccl_link.h"
#include "disagg/transport/transports.h"
#include "tests/catch.h"
#include "tests/disagg/fake_nccl.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::nccl_test {

using namespace nccl;
using nccl::Message;

constexpr size_t KiB = 1024, MiB = 1024 * KiB;
constexpr PeerId kPoster = 1, kOwner = 2;

const TestedTransport& fake_transport() {
  for (const TestedTransport& transport : tested_transports())
    if (transport.name == "nccl") return transport;
  throw std::runtime_error("the suite has no nccl wire");
}

// A sender and the owner of memory, connected.
struct Pair {
  Pair() {
    REQUIRE(poster->connect(kOwner, owner->address()) == "");
    REQUIRE(owner->connect(kPoster, poster->address()) == "");
  }
  std::unique_ptr<Side> poster = make_side_here(fake_transport(), kPoster),
                        owner = make_side_here(fake_transport(), kOwner);
};

TEST_CASE("nccl: over host memory it is refused, and the error says what it needs", "[nccl]") {
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

TEST_CASE("nccl: a library that is absent or is not NCCL is named", "[nccl]") {
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
  message.asked = Ask{5, 1, 3, {7, 9, 0x1234567890abcdefu}, KvOp::read, {{4096, 100}, {8192, 1}}};
  return message;
}

TEST_CASE("nccl: a message arrives whole or is refused", "[nccl]") {
  for (auto kind : {Message::ask, Message::accepted, Message::refused, Message::go, Message::drop, Message::placed,
                    Message::lost, Message::join}) {
    Message told{.kind = kind, .seq = 77};
    if (kind == Message::ask) told = some_ask();
    if (kind == Message::join) {
      CHECK(!read_message(to_bytes(told)));  // without its communicator
      told.id.emplace();
      told.id->internal[0] = 'x', told.id->internal[127] = 'y';
    }
    const std::string text = to_bytes(told);
    auto message = read_message(text);
    REQUIRE(message);
    CHECK((message.value().kind == kind && message.value().seq == 77));
    if (told.id) CHECK(std::memcmp(message.value().id->internal, told.id->internal, 128) == 0);
    for (size_t n = 0; n < text.size(); ++n) CHECK(!read_message(text.substr(0, n)));
    CHECK(!read_message(text + "x"));
    if (kind == Message::ask) {
      const Ask &ask = *message.value().asked, &asked = *told.asked;
      CHECK((ask.post == asked.post && ask.group == asked.group && ask.n_groups == asked.n_groups));
      CHECK((ask.registration == asked.registration && ask.op == asked.op && ask.ranges == asked.ranges));
      continue;
    }
    told.asked = some_ask().asked;
    CHECK(!read_message(to_bytes(told)));
  }
}

TEST_CASE("nccl: a request that no sender makes is refused", "[nccl]") {
  const auto taken = [](std::vector<AddressRange> ranges, uint32_t group = 1, KvOp op = KvOp::read) {
    Message message = some_ask();
    message.asked->ranges = std::move(ranges), message.asked->group = group, message.asked->op = op;
    return read_message(to_bytes(message)).ok();
  };
  CHECK((taken({}) && taken({{0, kGroupBytes}}) && taken({kGroupParts, {1, 1}})));
  for (const std::vector<AddressRange>& none : std::initializer_list<std::vector<AddressRange>>{
           {{0, kGroupBytes}, {0, 1}}, {{0, UINT64_MAX}}, {{UINT64_MAX - 5, 10}}, {{100, 0}}})
    CHECK(!taken(none));
  CHECK((!taken({}, 3) && !taken({}, 1, KvOp(2))));
}

TEST_CASE("nccl: a transfer is cut into groups that NCCL takes", "[nccl]") {
  auto* from = reinterpret_cast<std::byte*>(size_t(1) << 40);
  auto* to = reinterpret_cast<std::byte*>(size_t(1) << 41);
  const auto cut = [](const std::vector<Copy>& copies) { return nccl::Transfer(1, {}, copies).groups; };
  CHECK(cut({}).size() == 1);
  CHECK(cut({{from, to, 0}})[0].empty());
  // Neighbours on both sides are one call. Neighbours on one side alone are two.
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

TEST_CASE("nccl: a connection fails with the reason why its communicator cannot be made", "[nccl]") {
  auto poster = make_side_here(fake_transport(), kPoster), owner = make_side_here(fake_transport(), kOwner);
  fail_fake_joins(true);
  const std::string why = poster->connect(kOwner, owner->address());
  fail_fake_joins(false);
  INFO(why);
  CHECK(why.find("invalid usage") != std::string::npos);
  CHECK(why.find("NCCL_HOSTID") != std::string::npos);
  CHECK(poster->connect(kOwner, owner->address()) == "");
}

TEST_CASE("nccl: a transport has ended only when NCCL has released its aborted communicators", "[nccl]") {
  { Pair(); }
  CHECK(fake_reclaims() == 0);
}

TEST_CASE("nccl: a communicator that breaks ends its link, and the peer may be connected again", "[nccl]") {
  Pair pair;
  auto &poster = pair.poster, &owner = pair.owner;
  int failed = 0;
  for (int round = 0; round < 8 || (failed == 0 && round < 1000); ++round) {
    const KvOp op = KvOp(round % 2);
    const RemoteKey key = owner->open(kPoster, op, {{0, 16 * MiB}});
    const int made = fake_comms_made();
    owner->fill(0, 16 * MiB, 2);
    poster->fill(0, 16 * MiB, 1);
    std::vector<TransferId> ids;
    for (size_t i = 0; i < 4; ++i)
      ids.push_back(poster->post({kOwner, op, key, 0}, {{i * 4 * MiB, i * 4 * MiB, 4 * MiB}}));
    wait_until([&] { return owner->arrived(key) >= 1; });
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
    const RemoteKey next = owner->open(kPoster, KvOp::write, {{0, MiB}});
    // If this transfer is the first to see the error, it fails. The next one has a new link.
    TransferState state = TransferState::failed;
    for (int i = 0; i < 100 && state != TransferState::done; ++i) {
      REQUIRE(poster->connect(kOwner, owner->address()) == "");
      state = settle(*poster, poster->post({kOwner, KvOp::write, next, 0}, {{0, 0, MiB}}));
    }
    CHECK(state == TransferState::done);
    CHECK(owner->differing(0, MiB, 1) == 0);
    CHECK(fake_comms_made() >= made + 2);
    close_for_good(*owner, next);
  }
  CHECK(failed > 0);
}

// The owner reports such a group as lost, although both ends run all of it.
TEST_CASE("nccl: a registration that is closed while groups run breaks no communicator", "[nccl]") {
  Pair pair;
  auto &poster = pair.poster, &owner = pair.owner;
  const int made = fake_comms_made();
  int failed = 0;
  for (int round = 0; round < 100 || (failed == 0 && round < 1000); ++round) {
    const KvOp op = KvOp(round % 2);
    const RemoteKey key = owner->open(kPoster, op, {{0, 16 * MiB}});
    std::vector<TransferId> ids;
    for (size_t i = 0; i < 4; ++i)
      ids.push_back(poster->post({kOwner, op, key, 0}, {{i * 4 * MiB, i * 4 * MiB, 4 * MiB}}));
    wait_until([&] { return owner->arrived(key) >= 1 + round % 3; });
    close_for_good(*owner, key);
    for (TransferId id : ids) failed += settle(*poster, id) == TransferState::failed;
  }
  CHECK(failed > 0);
  CHECK(fake_comms_made() == made);
}

}  // namespace xpyd::testing::nccl_test
