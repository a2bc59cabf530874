// Real worker processes under a conductor of this process. They join, are killed, stopped and drained, and change their
// role while requests run, over every transport that leaves a process. (rdma runs in the virtual machine of `make check
// STAGE=rdma`; nccl needs GPUs.) A client's answer must equal that of an undisturbed run. XPYD_BIN names the program,
// and `make test` sets it.
//
//   make check STAGE=process-chaos CHAOS_SECONDS=120 [WIRE=tcp] [SEED=2] [LEASE=0.5]

#include "disagg/processes/worker.h"
#include "tests/process_bed.h"

namespace xpyd::testing::processes_test {

// Transports that leave a process. rdma and nccl need devices, so WIRE must name them.
std::vector<std::string> transport_names() {
  if (const char* one = std::getenv("WIRE"); one && *one) return {one};
  std::vector<std::string> names;
  for (const TransportRow& row : transports())
    if (row.leaves_process && row.name != std::string("rdma") && row.name != std::string("nccl"))
      names.push_back(row.name);
  return names;
}

FetchStats fetched(Bed& bed) {
  FetchStats sum;
  for (const InstanceStats& s : bed.cluster().stats().instances)
    sum.fetches += s.fetch.fetches, sum.failed += s.fetch.failed, sum.lent += s.fetch.lent,
        sum.copies += s.fetch.copies, sum.copies_dropped += s.fetch.copies_dropped;
  return sum;
}

// Counts the blocks that instances of a role have reported.
size_t known(Bed& bed, Role role) {
  return bed.cluster().conductor().look([role](const ClusterState& cluster) {
    size_t n = 0;
    for (const auto& [id, member] : cluster.members())
      if (member.info.role == role) n += cluster.board().known_blocks(member);
    return n;
  });
}

// Each transport carries the first order, and each order uses some transport.
TEST_CASE("processes: every order and every transport give the answers of one instance", "[processes]") {
  NEEDS_PROGRAM();
  const Words orders[] = {{"--disagg", "prefill_first"},
                          {"--kv-transfer", "pull"},
                          {"--disagg", "decode_first"},
                          {"--disagg", "conditional_threshold"},
                          {"--reservation", "escrow"}};
  const std::vector<std::string> all = transport_names();
  for (size_t w = 0; w < all.size(); ++w)
    for (size_t i = 0; i < std::size(orders); ++i) {
      if (i > 0 && i % all.size() != w) continue;
      const std::string& transport = all[w];
      const Words& order = orders[i];
      INFO(transport << " " << order[0] << " " << order[1]);
      Words words = {"--transport", transport};
      words.insert(words.end(), order.begin(), order.end());
      Bed bed(words);
      bed.start("prefill");
      bed.start("decode");
      REQUIRE(bed.cluster().wait_members(2, 60));
      for (int k = 0; k < 10; ++k) bed.ask(1 + 37 * (k % 5), k % 3, 6, 1 + k % 2);
      bed.check_answers();
      bed.check_memory();
      CHECK(bed.sum(&InstanceStats::kv_refused) == 0);
      const auto logged = bed.check_logs();
      CHECK(logged.at("files") == 3);
      CHECK(logged.at("place") == 10);
      CHECK(logged.at("order") == 10);
      CHECK(logged.at("plan") > 10);
      CHECK(logged.at("traces") == 10);
      if (order[1] == "prefill_first") CHECK(logged.at("decoding") == 10);
    }
}

TEST_CASE("processes: over every transport a killed worker is replaced, and nothing is lost or wrong", "[processes]") {
  NEEDS_PROGRAM();
  for (const std::string& transport : transport_names()) {
    INFO(transport);
    Bed bed({"--transport", transport}, kLongLease, "2P2D");
    const char* roles[] = {"prefill", "prefill", "decode", "decode"};
    std::vector<size_t> alive;
    for (const char* role : roles) alive.push_back(bed.start(role));
    REQUIRE(bed.cluster().wait_members(4, 60));
    for (size_t victim : {0, 2}) {
      for (int i = 0; i < 8; ++i) bed.ask(20 + 10 * i, i % 3, 40);
      bed.child(alive[victim]).end(SIGKILL);
      alive[victim] = bed.start(roles[victim]);
    }
    bed.check_answers();
    bed.check_memory();
    CHECK(bed.cluster().stats().conductor.left == 2);
  }
}

TEST_CASE("processes: prefixes are fetched from other workers, also with int8 KV, ranks or a host tier",
          "[processes][fetch]") {
  NEEDS_PROGRAM();
  const Words memories[] = {
      {"--kv-dtype", "int8"}, {"--prefill-tp", "2", "--decode-pp", "2"}, {"--host-kv-bytes", "4MiB"}};
  const std::vector<std::string> all = transport_names();
  for (size_t m = 0; m < std::size(memories); ++m) {
    const Words& memory = memories[m];
    const std::string& transport = all[m % all.size()];
    INFO(transport << " " << memory[0]);
    Words words = {"--transport", transport, "--kv-fetch", "always", "--placement", "round_robin"};
    words.insert(words.end(), memory.begin(), memory.end());
    Bed bed(words, kLongLease, "2P1D");
    for (const char* role : {"prefill", "prefill", "decode"}) bed.start(role);
    REQUIRE(bed.cluster().wait_members(3, 60));
    size_t blocks = 0;  // of each family's first prompts: only the second goes to the worker without them
    for (int i = 0; i < 24; ++i) {
      const int prompt = 40 + 37 * (i % 6);
      bed.ask(prompt, i % 3, 6, 1 + i % 2);
      if (i < 3) blocks += size_t(prompt / 16);
      if (i % 3 == 2) bed.check_answers();
      if (i == 2) REQUIRE(until(60, [&] { return known(bed, Role::prefill) >= blocks; }));
    }
    bed.check_memory();
    CHECK(until(60, [&] { return fetched(bed).lent > 0 && fetched(bed).fetches > 0; }));
    CHECK(fetched(bed).failed == 0);
    CHECK(bed.cluster().stats().conductor.failed_attempts == 0);
    const int64_t fetches = fetched(bed).fetches;
    CHECK(bed.check_logs().at("fetch_or_compute") >= fetches);
  }
}

TEST_CASE("processes: copies of prompts go to the other decode worker over tcp", "[processes][copies]") {
  NEEDS_PROGRAM();
  Bed bed({"--transport", "tcp", "--decode-copies", "2", "--placement", "round_robin"}, kLongLease, "1P2D");
  const pid_t prefill = bed.child(bed.start("prefill")).pid;
  for (int i = 0; i < 2; ++i) bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  CHECK(bed.cluster().process_of("P0") == process_name(prefill));
  CHECK(bed.cluster().process_of("P0") != "pid" + std::to_string(prefill));  // another host may have it, too
  for (int family = 0; family < 3; ++family) bed.ask(150, family, 40);
  bed.check_answers();
  CHECK(until(60, [&] { return fetched(bed).copies + fetched(bed).copies_dropped == 3; }));
  CHECK(fetched(bed).copies > 0);  // one is dropped if its reader's memory is full
  bed.check_memory();
}

TEST_CASE("processes: workers leave, come and change their role while requests run", "[processes]") {
  NEEDS_PROGRAM();
  Bed bed({"--transport", "tcp"});
  bed.start("prefill");
  const size_t second = bed.start("prefill");
  bed.start("decode");
  REQUIRE(bed.cluster().wait_members(3, 60));
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  CHECK(bed.child(second).end(SIGTERM) == 0);  // it drains, then ends by itself
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.start("decode");
  auto wait_names = [&](int p, int d) {
    CHECK(until(60, [&] {
      std::map<char, int> count;
      for (const InstanceInfo& info : bed.cluster().conductor().members()) ++count[info.name[0]];
      return count['P'] == p && count['D'] == d;
    }));
  };
  wait_names(1, 2);
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  REQUIRE(bed.cluster().retire("D0", Role::prefill).ok());
  CHECK_FALSE(bed.cluster().retire("D7", Role::prefill).ok());
  for (int i = 0; i < 20; ++i) bed.ask(60 + i, i % 3, 20);
  bed.check_answers();
  wait_names(2, 1);
  CHECK(bed.cluster().conductor().stats().conductor.failed_attempts == 0);  // no attempt failed
  bed.ask(100, 1, 10);
  bed.check_answers();
  bed.check_memory();
}

TEST_CASE("processes: chaos: workers or stages are killed and stopped under load, and nothing is lost or wrong",
          "[.][slow][process-chaos]") {
  NEEDS_PROGRAM();
  const char* seconds = std::getenv("SECONDS_OF_CHAOS");
  const char* patient = std::getenv("LEASE");  // for a slow, emulated machine
  Random random(uint64_t(std::getenv("SEED") ? std::atoi(std::getenv("SEED")) : 1));
  bool reserve_blocks = false;
  for (const bool stages : {false, true})
    for (const std::string& transport : transport_names()) {
      if (stages && transport == "rdma") continue;  // it cannot carry activations
      reserve_blocks = !reserve_blocks;
      const double lease = stages ? kLongLease : patient ? std::atof(patient) : kLease;
      Words words = {"--transport", transport, "--reservation", reserve_blocks ? "escrow" : "off"};
      if (stages) words.insert(words.end(), {"--ranks", "processes", "--prefill-pp", "2", "--decode-pp", "2"});
      INFO(transport << " " << reserve_blocks << " " << stages);
      Bed bed(words, lease, "2P2D");
      const char* roles[] = {"prefill", "prefill", "decode", "decode"};
      std::vector<size_t> alive;
      for (const char* role : roles) alive.push_back(bed.start(role));
      REQUIRE(bed.cluster().wait_members(4, 60));
      const double end = bed.clock().now() + (seconds ? std::atof(seconds) : 4);
      int kills = 0, stops = 0, asked = 0;
      while (bed.clock().now() < end) {
        for (int i = 0; i < 6; ++i, ++asked) bed.ask(20 + 10 * int(random.below(12)), int(random.below(3)), 40);
        const size_t worker = random.below(4);
        pid_t victim = bed.child(alive[worker]).pid;
        if (stages) {  // heads are not killed: they get new stages
          const std::set<pid_t> all = children_of(victim);
          if (all.empty()) continue;
          victim = random.below(2) ? *all.begin() : *all.rbegin();
        }
        if (random.below(stages ? 4 : 2) > 0) {
          if (stages)
            ::kill(victim, SIGKILL);
          else
            bed.child(alive[worker]).end(SIGKILL), alive[worker] = bed.start(roles[worker]);
          ++kills;
        } else {  // stopped longer than its lease: a worker comes back as a zombie; a stage is waited for, or given up
          ::kill(victim, SIGSTOP);
          const double most = stages ? 0.5 : 2 * lease;
          std::this_thread::sleep_for(std::chrono::duration<double>(most * random.uniform()));
          ::kill(victim, SIGCONT);
          ++stops;
        }
        std::this_thread::sleep_for(std::chrono::duration<double>(0.4 * random.uniform()));
      }
      bed.check_answers();
      bed.check_memory();
      const ConductorStats totals = bed.cluster().conductor().stats().conductor;
      std::printf(
          "chaos of %s over %s: %d requests, %d killed, %d stopped, %d attempts failed, %d choices placed anew; "
          "0 lost, 0 wrong\n",
          stages ? "stages" : "processes", transport.c_str(), asked, kills, stops, int(totals.failed_attempts),
          int(totals.replaced_choices));
      if (stages) continue;
      const auto logged = bed.check_logs();
      CHECK(logged.at("files") >= 5);  // from all workers except those killed before they had one
      CHECK(logged.at("files") <= 5 + kills);
      CHECK(logged.at("place") == totals.attempts);
      CHECK(logged.at("plan") > 0);
      CHECK(logged.at("traces") == asked);
    }
}

}  // namespace xpyd::testing::processes_test
