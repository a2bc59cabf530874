// Steps that take longer than a lease, as on a slow or crowded machine. An instance inside one is alive. Its grants,
// the messages that reach it meanwhile and the requests placed on it stay valid. (Such an instance was once declared
// gone with all its requests, which filled the first step of the instance that replaced it: on a starved machine 27,429
// attempts failed over 258 requests.)

#include "tests/disagg/scene.h"

namespace xpyd::testing::long_step_test {

constexpr double kLease = 0.4;  // seconds

class SlowCluster final : public Scene {
 public:
  SlowCluster(const char* topology, const char* disagg, bool pull) : Scene(topology, slow(disagg, pull)) {}
  void slow_down(Role role, double step_s) {
    for (auto& [id, node] : nodes)
      if (node->role == role) node->step_s = step_s;
  }
  // Prompts of 10, 19, … tokens.
  void ask_all(int n, int max_tokens) {
    for (int i = 0; i < n; ++i) ask(uint64_t(i) + 1, 10 + 9 * i, max_tokens, i);
  }
  void settle() {
    rest(200000, int(4000 * kLease));
    check_answers();
    renewed_ = 0;
    ticks(int(1000 * kLease));
    CHECK(renewed_ == 0);  // no lease is left anywhere
  }
  void send(InstanceId from, InstanceId to, Message message) override {
    renewed_ += std::holds_alternative<KvRenewed>(message);
    SimCluster::send(from, to, std::move(message));
  }

 private:
  static SimOptions slow(const char* disagg, bool pull) {
    SimOptions options = in(disagg, pull);
    options.conductor.disagg_options.max_local_prefill_tokens = 1000;
    options.transport = [](const TransportOptions& transport) {
      return find_transport("local")->make(transport).value();
    };
    return options;
  }
  int renewed_ = 0;
};

TEST_CASE("long steps: no instance is given up for a long step, in any order", "[disagg][cluster][long_step]") {
  for (const auto& [disagg, pull] : {std::pair("prefill_first", false),
                                     {"prefill_first", true},
                                     {"decode_first", false},
                                     {"conditional_threshold", false}})
    for (const bool slow_p : {false, true})
      for (const bool slow_d : {false, true}) {
        INFO(disagg << " pull " << pull << ", slow: P " << slow_p << " D " << slow_d);
        SlowCluster cluster("1P2D", disagg, pull);
        if (slow_p) cluster.slow_down(Role::prefill, 3.5 * kLease);
        if (slow_d) cluster.slow_down(Role::decode, 2.5 * kLease);
        cluster.ask_all(4, 4);  // a step is 16 tokens
        cluster.settle();
        const ConductorStats totals = cluster.conductor().stats().conductor;
        CHECK((totals.left == 0 && totals.failed_attempts == 0));
        for (const InstanceStats& s : cluster.conductor().stats().instances) CHECK(s.kv_refused == 0);
      }
}

TEST_CASE("a stopped conductor gives up no instance for messages that it has not read",
          "[disagg][cluster][long_step]") {
  for (const double leases : {0.5, 1.5, 10.0}) {
    SlowCluster cluster("1P2D", "prefill_first", false);
    cluster.ask_all(6, 20);
    cluster.ticks(5);
    cluster.conductor_stopped_until_s = cluster.clock.seconds + leases * kLease;
    cluster.ticks(int(1000 * leases * kLease));
    CHECK_FALSE(cluster.conductor().wait_idle(0));
    cluster.settle();
    CHECK(cluster.conductor().stats().conductor.left == 0);
    CHECK(cluster.conductor().stats().conductor.failed_attempts == 0);
    cluster.nodes.at(0)->stopped_until_s = cluster.clock.seconds + 2 * kLease;
    cluster.ticks(int(1300 * kLease));  // it still finds a silent instance
    CHECK(cluster.conductor().stats().conductor.left == 1);
  }
}

TEST_CASE("long steps: an instance that does not end its step is given up", "[disagg][cluster][long_step]") {
  SlowCluster cluster("1P2D", "prefill_first", false);
  SimCluster::Node* stuck = cluster.find("D1");
  REQUIRE(stuck);
  stuck->step_s = 1000 * kLongestTurnSeconds;
  for (uint64_t id = 1; id <= 4; ++id) cluster.ask(id, 20, 4, int(id));
  cluster.ticks(int(900 * kLongestTurnSeconds));
  CHECK(cluster.conductor().members().size() == 3);
  cluster.ticks(int(1000 * (0.2 * kLongestTurnSeconds + kLease)));
  CHECK(cluster.conductor().members().size() == 2);
  CHECK(cluster.conductor().stats().conductor.failed_attempts == 2);  // the other two are D2's
  cluster.crash(1, false);
  cluster.settle();
}

}  // namespace xpyd::testing::long_step_test
