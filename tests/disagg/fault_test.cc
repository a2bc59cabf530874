#include "disagg/transport/fault.h"

#include <bit>
#include <cstring>

#include "base/clock.h"
#include "base/random.h"
#include "disagg/transport/transports.h"
#include "experiments/connect_and_wait.h"
#include "tests/catch.h"
#include "tests/disagg/fake_nccl.h"

namespace xpyd::testing::fault_test {
namespace {

// Two ends of the local transport under a virtual clock. The sender's end is faulty.
struct Faulty {
  explicit Faulty(const FaultOptions& faults) : source(1 << 16), destination(1 << 16) {
    Random random(1);
    for (std::byte& byte : source) byte = std::byte(random.next());
    options.queue = &cpu_queue();
    options.clock = &clock;
    options.self = 1;
    options.regions = {source};
    poster = make_fault_transport(make_local_transport(options).value(), faults, options);
    options.self = 2;
    options.regions = {destination};
    owner = make_local_transport(options).value();
    REQUIRE(connect_and_wait(*poster, 2, owner->address()).ok());
    REQUIRE(connect_and_wait(*owner, 1, poster->address()).ok());
  }
  RemoteKey open() {
    const MemoryRange all(destination);
    return owner->open(1, KvOp::write, {&all, 1}).value();
  }
  // The whole memory in pieces of 1 KiB.
  TransferPlan plan() const {
    TransferPlan plan;
    for (size_t at = 0; at < source.size(); at += 1024, plan.bytes += 1024)
      plan.copies.push_back({source.data() + at, poster->remote(2, 0) + at, 1024});
    return plan;
  }
  TransferId post(const RemoteKey& key, double deadline_s = 0) {
    return poster->post({2, KvOp::write, key, deadline_s}, plan());
  }
  TransferState poll_at(double seconds, TransferId id) {
    clock.seconds = seconds;
    return poster->poll(id);
  }
  TransferState move(const RemoteKey& key) { return poster->poll(post(key)); }
  int differing_bits() const {
    int n = 0;
    for (size_t i = 0; i < source.size(); ++i) n += std::popcount(unsigned(source[i] ^ destination[i]));
    return n;
  }
  const FaultCounts& counts() const { return *fault_counts(*poster); }

  VirtualClock clock;
  TransportOptions options;
  std::vector<std::byte> source, destination;
  std::unique_ptr<KvTransport> poster, owner;
};

TEST_CASE("fault: each fault does what its name says", "[transport]") {
  SECTION("none: every byte arrives") {
    Faulty f({.seed = 1});
    const RemoteKey key = f.open();
    CHECK(f.move(key) == TransferState::done);
    CHECK(f.differing_bits() == 0);
  }
  SECTION("drop: a transfer stays in flight until its deadline or its cancellation") {
    Faulty f({.seed = 1, .drop = 1});
    const RemoteKey key = f.open();
    const TransferId id = f.post(key, 5);
    CHECK(f.poster->poll(id) == TransferState::in_flight);
    CHECK(f.poll_at(5, id) == TransferState::failed);
    CHECK(f.move(key) == TransferState::failed);
    const TransferId cancelled = f.post(key, 50);
    f.poster->cancel(cancelled);
    CHECK(f.poster->poll(cancelled) == TransferState::failed);
    CHECK(f.owner->arrived(key) == 0);
    CHECK((f.poster->stats().failed == 3 && f.counts().dropped == 3));
  }
  SECTION("delay: transfers take the given time on average") {
    Faulty f({.seed = 1, .delay_s = 2});
    const RemoteKey key = f.open();
    double sum = 0;
    for (int i = 0; i < 200; ++i) {
      const double posted = f.clock.seconds;
      const TransferId id = f.post(key);
      while (f.poster->poll(id) == TransferState::in_flight) f.clock.seconds += 0.01;
      sum += f.clock.seconds - posted;
    }
    CHECK(sum / 200 > 1);
    CHECK(sum / 200 < 3);
    // One transfer arrives when its registration is closed, the other one after its deadline.
    const TransferId late = f.post(key);
    const TransferId hurried = f.poster->post({2, KvOp::write, key, f.clock.seconds + 1e-9}, {});
    CHECK(f.owner->close(key));
    f.clock.seconds += 100;
    CHECK(f.poster->poll(late) == TransferState::failed);
    CHECK(f.poster->poll(hurried) == TransferState::failed);
    CHECK(f.owner->stats().refused == 1);
  }
  SECTION("reorder: a transfer may arrive after a later one") {
    Faulty f({.seed = 3, .reorder = 0.5});
    const RemoteKey key = f.open();
    std::byte* there = f.poster->remote(2, 0);
    int overtaken = 0;
    for (int i = 0; i < 200; ++i) {  // two transfers to one place: the last one to arrive counts
      const TransferPlan first{{{f.source.data(), there, 64}}, 64}, second{{{f.source.data() + 64, there, 64}}, 64};
      const TransferId a = f.poster->post({2, KvOp::write, key}, first),
                       b = f.poster->post({2, KvOp::write, key}, second);
      f.clock.seconds += 1;
      CHECK(f.poster->poll(a) == TransferState::done);
      CHECK(f.poster->poll(b) == TransferState::done);
      overtaken += std::memcmp(there, f.source.data(), 64) == 0;
    }
    CHECK(overtaken > 30);
    CHECK(overtaken < 120);
  }
}

TEST_CASE("fault: a seed repeats its faults, and another seed has others", "[transport]") {
  const auto run = [](uint64_t seed) {
    Faulty f({.seed = seed, .drop = 0.2, .reorder = 0.2, .delay_s = 0.5});
    const RemoteKey key = f.open();
    std::vector<std::byte> seen;
    for (int i = 0; i < 50; ++i) {
      const TransferId id = f.post(key, f.clock.seconds + 3);
      TransferState state;
      while ((state = f.poster->poll(id)) == TransferState::in_flight) f.clock.seconds += 0.01;
      seen.push_back(std::byte(state));
      seen.insert(seen.end(), f.destination.begin(), f.destination.begin() + 2048);
      std::fill(f.destination.begin(), f.destination.end(), std::byte(0));
    }
    const FaultCounts& c = f.counts();
    for (int64_t n : {c.dropped, c.reordered}) {
      CHECK(n > 0);
      CHECK(n < 30);
    }
    return seen;
  };
  const auto first = run(7);
  CHECK(first == run(7));
  CHECK(first != run(8));
}

TEST_CASE("--transport: a transport or faults around one are parsed, and an error says what was expected",
          "[transport]") {
  const auto plain = parse_transport("tcp");
  REQUIRE(plain.ok());
  CHECK(std::string(plain.value().row->name) == "tcp");
  CHECK(!plain.value().faults);
  const auto faulty = parse_transport("fault:shm,seed=7,drop=0.01,delay=2ms,reorder=1");
  REQUIRE(faulty.ok());
  CHECK(std::string(faulty.value().row->name) == "shm");
  const FaultOptions& f = *faulty.value().faults;
  CHECK(f.seed == 7);
  CHECK(f.drop == 0.01);
  CHECK(f.delay_s == 2e-3);
  CHECK(f.reorder == 1);
  CHECK(parse_transport("fault:local").ok());
  for (const auto& [text, part] :
       {std::pair{"pigeon", "there is no transport named \"pigeon\"; expected one of local handoff"},
        {"", "there is no transport named \"\""},
        {"fault", "there is no transport named \"\""},
        {"fault:", "there is no transport named \"\""},
        {"fault:pigeon,drop=1", "there is no transport named \"pigeon\""},
        {"fault:fault:tcp", "there is no transport named \"fault:tcp\""},
        {"fault:handoff,drop=1", "moves no bytes"},
        {"fault:tcp,dorp=1", "there is no fault named \"dorp\"; expected fault:TRANSPORT,KEY=VALUE"},
        {"fault:tcp,", "there is no fault named \"\""},
        {"fault:tcp,drop", "drop is not a probability"},
        {"fault:tcp,drop=2", "drop is not a probability"},
        {"fault:tcp,drop=-1", "drop is not a probability"},
        {"fault:tcp,drop=nan", "drop is not a probability"},
        {"fault:tcp,drop=0.1x", "drop is not a probability"},
        {"fault:tcp,delay=2", "delay needs a unit"},
        {"fault:tcp,delay=ms", "delay is not a time"},
        {"fault:tcp,seed=1.5", "seed is not a whole number"},
        {"fault:tcp,seed=", "seed is not a whole number"}}) {
    INFO(text);
    const auto parsed = parse_transport(text);
    REQUIRE(!parsed.ok());
    CHECK(parsed.error().message.find(part) != std::string::npos);
    CHECK(parsed.error().message.starts_with("--transport " + std::string(text)));
  }
}

}  // namespace
}  // namespace xpyd::testing::fault_test
