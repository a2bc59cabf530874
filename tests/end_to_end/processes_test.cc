// Real worker processes under a conductor of this process: they join, are killed, stopped, drained
// and told to change their role while requests run, over every wire that leaves a process (rdma in
// the virtual machine of `make check STAGE=rdma`; nccl needs cards). What a client gets is what an
// undisturbed run gives. XPYD_BIN names the program; `make test` sets it.
//
//   make check STAGE=process-chaos CHAOS_SECONDS=120 [WIRE=handoff] [SEED=2] [LEASE=0.5]

#include <fstream>
#include <iterator>

#include "server/metrics.h"
#include "tests/process_bed.h"

namespace xpyd::testing::processes_test {
namespace {

// Those that leave a process; rdma and nccl need devices, and so to be named.
std::vector<std::string> wires() {
  if (const char* one = std::getenv("WIRE"); one && *one) return {one};
  std::vector<std::string> names;
  for (const TransportRow& row : transports())
    if (row.leaves_process && row.name != std::string("rdma") && row.name != std::string("nccl"))
      names.push_back(row.name);
  return names;
}

TEST_CASE("processes: every order over every wire gives what one instance gives", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const std::string& wire : wires())
    for (const Words& order :
         {Words{"--disagg", "prefill_first"}, Words{"--kv-transfer", "pull"}, Words{"--disagg", "decode_first"},
          Words{"--disagg", "conditional_cost"}, Words{"--disagg", "append_cost"}, Words{"--reservation", "escrow"}}) {
      if (find_transport(wire)->shared_pool && order[1] == "pull") continue;  // refused
      INFO(wire << " " << order[0] << " " << order[1]);
      Words words = {"--transport", wire, "--kv-checksum", "on"};
      words.insert(words.end(), order.begin(), order.end());
      Bed bed(words);
      bed.start("prefill");
      bed.start("decode");
      REQUIRE(bed.cluster().wait_members(2, 60));
      for (int i = 0; i < 10; ++i) bed.ask(1 + 37 * (i % 5), i % 3, 6, 1 + i % 2);
      bed.check_answers();
      bed.check_memory();
      int64_t refused = 0;
      for (const InstanceStats& s : bed.cluster().stats().instances) refused += s.kv_refused;
      CHECK(refused == 0);
      const auto logged = bed.check_logs();
      CHECK(logged.at("files") == 3);
      CHECK(logged.at("place") == 10);
      CHECK(logged.at("order") == 10);
      CHECK(logged.at("plan") > 10);
      CHECK(logged.at("lives") == 10);
      if (order[1] == "prefill_first") CHECK(logged.at("decoding") == 10);
    }
}

TEST_CASE("processes: an answer that has come is counted", "[processes][metrics]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "shm", "--prefix-cache", "off"});
  bed.start("prefill");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(2, 60));
  int64_t prompts = 0, tokens = 0;
  for (int i = 0; i < 20; ++i) {
    bed.ask(20 + i, i, 3);
    prompts += 20 + i;
    tokens += 3;
    REQUIRE(bed.cluster().wait_idle(60));
    int64_t counted_prompts = 0, counted_tokens = 0;
    for (const InstanceStats& s : bed.cluster().stats().instances) {
      counted_prompts += s.prompt_tokens;
      counted_tokens += s.generated_tokens;
    }
    CHECK(counted_prompts == prompts);
    CHECK(counted_tokens == tokens);
  }
}

TEST_CASE("processes: one pool for all of them, under schemes with and without a block table", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const Words& memory :
       {Words{"--allocator", "token"}, Words{"--allocator", "contiguous", "--kv-bytes", "8MiB"},
        Words{"--kv-layout", "token_major"},
        Words{"--prefill-tp", "2", "--prefill-pp", "2", "--decode-tp", "2", "--decode-pp", "2"}}) {
    INFO(memory[1]);
    Words words = {"--transport", "handoff"};
    words.insert(words.end(), memory.begin(), memory.end());
    Bed bed(words, kLongLease, "1P2D");
    bed.start("prefill");
    bed.start("decode");
    bed.start("decode");
    REQUIRE(bed.cluster().wait_members(3, 60));
    for (int i = 0; i < 30; ++i) bed.ask(1 + 37 * (i % 7), i % 3, 30, 1 + i % 2);
    bed.check_answers();
    bed.check_memory();
    const ServiceStats stats = bed.cluster().stats();
    REQUIRE(stats.process_pool);
    CHECK(stats.process_pool->blocks == stats.process_pool->free);
    const std::string text = Metrics("x", "tiny", 400).render(stats);
    const std::string blocks = std::to_string(stats.process_pool->blocks);
    CHECK(text.find("engine=\"pool\",state=\"free\"} " + blocks + "\n") != text.npos);
    CHECK(text.find("engine=\"P0\",state=\"free\"} 0\n") != text.npos);
    int64_t refused = 0, bytes = 0;
    for (const InstanceStats& s : bed.cluster().stats().instances) refused += s.kv_refused, bytes += s.transfer_bytes;
    CHECK(refused == 0);
    CHECK(bytes == 0);
  }
}

TEST_CASE("processes: a worker with another pool in mind is refused, and says so", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "handoff"});
  const size_t other = bed.start("prefill", {"--kv-bytes", "3MiB"});
  const int status = bed.child(other).wait();
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 2);
  std::ifstream log(bed.log(other));
  const std::string said{std::istreambuf_iterator<char>(log), {}};
  INFO(said);
  CHECK(said.find("--kv-bytes is 3145728 here, 2097152 at the conductor") != std::string::npos);
  bed.start("prefill");
  CHECK(bed.cluster().wait_members(1, 60));
}

TEST_CASE("processes: a prompt goes to the worker whose cache has its prefix", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "tcp", "--placement", "prefix_aware"});
  bed.start("prefill");
  bed.start("prefill");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  const Conductor& conductor = bed.cluster().conductor();
  const auto known = [&](int of) {  // blocks, on one of the two, or on both
    size_t n = 0;
    int at = 0;
    for (const InstanceInfo& info : conductor.members())
      if (info.role == Role::prefill && (of < 0 || at++ == of)) n += conductor.known_blocks(info.id);
    return n;
  };
  // Each prompt leaves 12 full blocks of 16 tokens, which are reported; until both have some.
  const double until = bed.clock().now() + 60;
  int families = 0;
  while (known(0) == 0 || known(1) == 0) {
    REQUIRE(families < 12);
    for (int i = 0; i < 2; ++i) bed.ask(200, families++, 4);
    bed.check_answers();
    while (known(-1) < size_t(12 * families) && bed.clock().now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(known(-1) == size_t(12 * families));
  }
  for (int family = families - 1; family >= 0; --family) {
    const uint64_t id = bed.ask(200, family, 4);
    bed.check_answers();
    CHECK(bed.recorder().choice(id).cached_tokens == 192);
  }
}

TEST_CASE("processes: a next turn is computed by the decode worker that has it", "[processes][order][append]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const std::string& wire : wires()) {
    if (find_transport(wire)->shared_pool) continue;  // whose prefix cache nobody reports
    INFO(wire);
    Bed bed({"--transport", wire, "--disagg", "append_cost"}, kLongLease, "1P2D");
    for (const char* role : {"prefill", "decode", "decode"}) bed.start(role);
    REQUIRE(bed.cluster().wait_members(3, 60));
    constexpr int kTalks = 4;
    for (int talk = 0; talk < kTalks; ++talk) bed.ask(200, talk, 6);
    bed.check_answers();
    const auto known = [&] {  // blocks, by the decode workers' reports
      size_t n = 0;
      for (const InstanceInfo& info : bed.cluster().conductor().members())
        if (info.role == Role::decode) n += bed.cluster().conductor().known_blocks(info.id);
      return n;
    };
    const auto sent = [&] {
      int64_t n = 0;
      for (const InstanceStats& s : bed.cluster().stats().instances) n += s.transfers;
      return n;
    };
    for (const double until = bed.clock().now() + 60;
         (known() < 12 * kTalks || sent() < kTalks) && bed.clock().now() < until;)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(known() == 12 * kTalks);
    for (int talk = 0; talk < kTalks; ++talk) {
      for (int i = 0; i < 8; ++i) bed.ask(300, 10 + talk * 8 + i, 1);  // P has much to do, and D no part in it
      bed.ask(260, talk, 6);
      REQUIRE(bed.cluster().wait_idle(60));
    }
    bed.check_answers();
    bed.check_memory();
    CHECK(sent() == kTalks);  // of the first turns
    const auto logged = bed.check_logs();
    CHECK(logged.at("append") == 2 * kTalks);
    CHECK(logged.at("order") == 2 * kTalks);
  }
}

// Their own prefix caches are off: a prefix is in a host tier alone.
TEST_CASE("processes: a prompt goes to the worker whose host tier has its prefix, or gets it from there",
          "[processes][fetch]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (bool fetches : {false, true}) {
    INFO((fetches ? "fetches" : "goes there"));
    Words words = {"--transport",     "tcp",
                   "--host-kv-bytes", "4MiB",
                   "--prefix-cache",  "off",
                   "--placement",     fetches ? "round_robin" : "dynamo",
                   "--kv-fetch",      fetches ? "always" : "never"};
    Bed bed(words, kLongLease, "2P1D");
    for (const char* role : {"prefill", "prefill", "decode"}) bed.start(role);
    REQUIRE(bed.cluster().wait_members(3, 60));
    const Conductor& conductor = bed.cluster().conductor();
    const auto known = [&] {  // blocks, in tiers of those who compute prompts
      size_t n = 0;
      for (const InstanceInfo& info : conductor.members())
        if (info.role == Role::prefill) n += conductor.known_blocks(info.id);
      return n;
    };
    const double until = bed.clock().now() + 60;
    constexpr int kFamilies = 4;
    for (int family = 0; family < kFamilies; ++family) {  // one by one: half a pool may be on its way to the host
      bed.ask(200, family, 4);
      REQUIRE(bed.cluster().wait_idle(60));
    }
    while (known() < size_t(12 * kFamilies) && bed.clock().now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(known() == size_t(12 * kFamilies));
    // Turns fall to the other of the two now and then.
    for (int i = 0; i < 3; ++i) {
      for (int family = kFamilies - 1; family >= 0; --family) {
        const uint64_t id = bed.ask(200, family, 4);
        REQUIRE(bed.cluster().wait_idle(60));
        CHECK(bed.recorder().choice(id).cached_tokens == 192);
      }
      bed.ask(40, 9 + i, 4);
      REQUIRE(bed.cluster().wait_idle(60));
    }
    bed.check_answers();
    bed.check_memory();
    const auto fetched = [&] {
      FetchStats sum;
      for (const InstanceStats& s : bed.cluster().stats().instances)
        sum.fetches += s.fetch.fetches, sum.failed += s.fetch.failed, sum.lent += s.fetch.lent;
      return sum;
    };
    const auto told = [&] { return fetched().lent > 0 && fetched().fetches > 0; };  // by the next signs of life
    for (int i = 0; fetches && i < 2000 && !told(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK((fetched().fetches > 0) == fetches);
    CHECK((fetched().lent > 0) == fetches);
    CHECK(fetched().failed == 0);
    CHECK(bed.cluster().stats().conductor.failed_attempts == 0);
  }
}

TEST_CASE("processes: prefixes come from other workers, whatever they are made of", "[processes][fetch]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  for (const std::string& wire : wires())
    for (const Words& memory : {Words{"--kv-dtype", "int8"}, Words{"--prefill-tp", "2", "--decode-pp", "2"},
                                Words{"--host-kv-bytes", "4MiB"}}) {
      if (find_transport(wire)->shared_pool) continue;  // one prefix index for all
      INFO(wire << " " << memory[0]);
      Words words = {"--transport", wire, "--kv-checksum", "on", "--kv-fetch", "always", "--placement", "round_robin"};
      words.insert(words.end(), memory.begin(), memory.end());
      Bed bed(words, kLongLease, "2P1D");
      for (const char* role : {"prefill", "prefill", "decode"}) bed.start(role);
      REQUIRE(bed.cluster().wait_members(3, 60));
      for (int i = 0; i < 24; ++i) {
        bed.ask(40 + 37 * (i % 6), i % 3, 6, 1 + i % 2);
        if (i % 3 == 2) bed.check_answers();
      }
      bed.check_memory();
      const auto fetched = [&] {
        FetchStats sum;
        for (const InstanceStats& s : bed.cluster().stats().instances) {
          sum.fetches += s.fetch.fetches, sum.failed += s.fetch.failed;
          sum.lent += s.fetch.lent;
        }
        return sum;
      };
      const auto told = [&] { return fetched().lent > 0 && fetched().fetches > 0; };  // by the next signs of life
      for (int i = 0; i < 2000 && !told(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      CHECK(fetched().fetches > 0);
      CHECK(fetched().failed == 0);
      CHECK(bed.cluster().stats().conductor.failed_attempts == 0);
      const int64_t fetches = fetched().fetches;
      CHECK(bed.check_logs().at("fetch_or_compute") >= fetches);
    }
}

TEST_CASE("processes: workers leave, come, and change their role while requests run", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  Bed bed({"--transport", "tcp"});
  bed.start("prefill");
  const size_t second = bed.start("prefill");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.child(second).signal(SIGTERM);  // drains, then ends by itself
  const int status = bed.child(second).wait();
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.start("decode");
  const double until = bed.clock().now() + 60;
  auto names = [&] {
    std::map<char, int> count;
    for (const InstanceInfo& info : bed.cluster().conductor().members()) ++count[info.name[0]];
    return count;
  };
  auto wait_names = [&](int p, int d) {
    while ((names()['P'] != p || names()['D'] != d) && bed.clock().now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(names()['P'] == p);
    CHECK(names()['D'] == d);
  };
  wait_names(1, 2);
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  REQUIRE(bed.cluster().retire("D0", Role::prefill).ok());
  CHECK_FALSE(bed.cluster().retire("D7", Role::prefill).ok());
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.check_answers();
  wait_names(2, 1);
  CHECK(bed.cluster().conductor().totals().failed_attempts == 0);  // nobody was hurt
  bed.ask(100, 1, 10);
  bed.check_answers();
  bed.check_memory();
}

// A group of pages takes 0.3 s to map here, so that a step takes seconds.
TEST_CASE("processes: a step that takes longer than a lease is nobody's death", "[processes]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  constexpr double kShortLease = 1.5;  // seconds
  Bed bed({"--transport", "tcp", "--allocator", "vattention", "--page-op-us", "300000", "--kv-map-ahead", "off"},
          kShortLease, "1C");
  bed.start("colocated");
  REQUIRE(bed.cluster().wait_members(1, 60));
  bed.ask(100, 1, 2);
  bed.check_answers();
  const auto waited = [&] { return bed.cluster().stats().instances.at(0).kv.vattention.map_wait_seconds; };
  const double until = bed.clock().now() + 60;
  while (waited() <= kShortLease && bed.clock().now() < until)  // told by the next sign of life
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(waited() > kShortLease);
  const ServiceStats stats = bed.cluster().stats();
  CHECK(stats.conductor.left == 0);
  CHECK(stats.conductor.failed_attempts == 0);
}

TEST_CASE("processes: chaos: workers are killed and stopped under load, and nothing is lost or wrong",
          "[processes][process-chaos]") {
  if (!std::getenv("XPYD_BIN")) SKIP_TEST("XPYD_BIN is not set");
  const char* seconds = std::getenv("SECONDS_OF_CHAOS");
  const double length = seconds ? std::atof(seconds) : 4;
  const char* patient = std::getenv("LEASE");  // where a machine is emulated, and slow
  const double lease = patient ? std::atof(patient) : kLease;
  Random random(uint64_t(std::getenv("SEED") ? std::atoi(std::getenv("SEED")) : 1));
  bool escrow = false;
  for (const std::string& wire : wires()) {
    escrow = !escrow;
    INFO(wire << " " << escrow);
    Bed bed({"--transport", wire, "--kv-checksum", "on", "--reservation", escrow ? "escrow" : "off"}, lease, "2P2D");
    const char* roles[] = {"prefill", "prefill", "decode", "decode"};
    std::vector<size_t> alive;
    for (const char* role : roles) alive.push_back(bed.start(role));
    REQUIRE(bed.cluster().wait_members(4, 60));
    const double end = bed.clock().now() + length;
    int kills = 0, stops = 0, asked = 0;
    while (bed.clock().now() < end) {
      for (int i = 0; i < 6; ++i, ++asked) bed.ask(20 + 10 * int(random.below(12)), int(random.below(3)), 40);
      const size_t victim = random.below(4);
      if (random.below(2) == 0) {
        bed.child(alive[victim]).end(SIGKILL);
        alive[victim] = bed.start(roles[victim]);
        ++kills;
      } else {  // longer than its lease: it comes back as a zombie
        bed.child(alive[victim]).signal(SIGSTOP);
        std::this_thread::sleep_for(std::chrono::duration<double>(2 * lease * random.uniform()));
        bed.child(alive[victim]).signal(SIGCONT);
        ++stops;
      }
      std::this_thread::sleep_for(std::chrono::duration<double>(0.4 * random.uniform()));
    }
    bed.check_answers();
    bed.check_memory();
    const ConductorStats totals = bed.cluster().conductor().totals();
    std::printf(
        "process chaos over %s: %d requests, %d killed, %d stopped, %d attempts failed, %d choices "
        "placed anew; 0 lost, 0 wrong\n",
        wire.c_str(), asked, kills, stops, int(totals.failed_attempts), int(totals.replaced_choices));
    for (int i = 0; i < kAttemptFailures; ++i)
      if (totals.failed_by[size_t(i)] > 0)
        std::printf("  %d %s\n", int(totals.failed_by[size_t(i)]), failure_name(AttemptFailure(i)));
    const auto logged = bed.check_logs();
    CHECK(logged.at("files") >= 5);  // of all but who was killed before it had one
    CHECK(logged.at("files") <= 5 + kills);
    CHECK(logged.at("place") == totals.attempts);
    CHECK(logged.at("plan") > 0);
    CHECK(logged.at("lives") == asked);
  }
}

}  // namespace
}  // namespace xpyd::testing::processes_test
