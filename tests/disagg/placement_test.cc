#include "disagg/placement.h"

#include <set>

#include "disagg/cluster.h"
#include "tests/catch.h"

namespace xpyd::testing::placement_test {
namespace {

Placement place(const char* policy, const std::vector<InstanceView>& instances, uint64_t random = 0) {
  return find_placement_policy(policy)->place({instances, 100, random});
}

TEST_CASE("topologies parse, and wrong ones say what is expected", "[disagg]") {
  CHECK(parse_topology("1C").value() == std::vector{Role::colocated});
  CHECK(parse_topology("2P1D").value() == std::vector{Role::prefill, Role::prefill, Role::decode});
  CHECK(parse_topology("1P1D2C").value().size() == 4);
  CHECK(parse_topology("2C1P1D").value()[0] == Role::colocated);
  for (const char* bad : {"", "P", "1P", "1D", "0C", "1X", "1P1D1", "1C1C", "-1C", "99999C", "1p1d", "65C"}) {
    INFO(bad);
    Result<std::vector<Role>> roles = parse_topology(bad);
    REQUIRE_FALSE(roles.ok());
    CHECK(roles.error().message.find("expected a form like") != std::string::npos);
  }
}

TEST_CASE("random reaches every pair and only eligible ones", "[disagg]") {
  std::vector<InstanceView> instances(5);
  instances[1].role = instances[2].role = Role::prefill;
  instances[3].role = instances[4].role = Role::decode;
  std::set<std::pair<int, int>> seen;
  Random random(3);
  for (int i = 0; i < 500; ++i) {
    Placement p = place("random", instances, random.next());
    seen.insert({p.prefill, p.decode});
  }
  CHECK(seen == std::set<std::pair<int, int>>{{0, 0}, {1, 3}, {1, 4}, {2, 3}, {2, 4}});
}

TEST_CASE("least_loaded weighs queued tokens on P and sequences on D", "[disagg]") {
  std::vector<InstanceView> instances(4);
  instances[0] = {.role = Role::prefill, .queued_tokens = 500};
  instances[1] = {.role = Role::prefill, .queued_tokens = 100};
  instances[2] = {.role = Role::decode, .sequences = 3};
  instances[3] = {.role = Role::decode, .sequences = 2};
  CHECK(place("least_loaded", instances) == Placement{1, 3});
  instances[1].queued_tokens = 600;
  instances[2].sequences = 0;
  CHECK(place("least_loaded", instances) == Placement{0, 2});
}

TEST_CASE("prefix_aware trades a hit against a queue", "[disagg]") {
  std::vector<InstanceView> instances(3);
  instances[0] = {.role = Role::prefill, .queued_tokens = 50, .cached_tokens = 80};
  instances[1] = {.role = Role::prefill};
  instances[2] = {.role = Role::decode};
  CHECK(place("prefix_aware", instances).prefill == 0);
  instances[0].queued_tokens = 81;
  CHECK(place("prefix_aware", instances).prefill == 1);
  CHECK(place("least_loaded", instances).prefill == 1);
}

}  // namespace
}  // namespace xpyd::testing::placement_test
