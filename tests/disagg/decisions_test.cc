#include "disagg/decisions.h"

#include <cmath>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::decisions_test {
namespace {

template <class T>
std::string written(const T& x) {
  JsonText json;
  JsonOut(json).write(x);
  return json.take();
}

TEST_CASE("decisions: any view comes back as it was, to the last bit, and is decided as it was", "[decisions]") {
  Random random(11);
  for (const PlacementPolicy& policy : placement_policies()) {
    for (int trial = 0; trial < 100; ++trial) {
      std::vector<InstanceView> instances(1 + random.below(5));
      for (InstanceView& i : instances)
        i = {.role = Role(random.below(3)),
             .queued = int(random.below(3)),
             .queued_tokens = int64_t(random.next() >> 1),
             .cached_tokens = int(random.below(1000)),
             .queue_s = random.uniform() / 3,
             .prefill_s = std::exp(100 * random.uniform() - 50),
             .step_with_s = random.uniform()};
      const ClusterView view{.instances = instances, .prompt_tokens = 1000, .random = random.next()};
      const std::string text = written(view);
      JsonIn::Keep keep;
      ClusterView again;
      JsonIn(nlohmann::json{}, keep).read(parse_json(text, "view").value(), again);
      REQUIRE(written(again) == text);
      REQUIRE(policy.place(again, {}) == policy.place(view, {}));
      for (size_t i = 0; i < instances.size(); ++i) REQUIRE(again.instances[i].prefill_s == instances[i].prefill_s);
    }
  }
}

TEST_CASE("decisions: zeros are left out and come back; another type is an error", "[decisions]") {
  CHECK(written(Placement{2, 0, -1}) == R"({"prefill":2,"source":-1})");
  JsonIn::Keep keep;
  Placement placed{7, 7, 7};
  JsonIn in(nlohmann::json{}, keep);
  in.read(nlohmann::json::parse(R"({"prefill":2,"source":-1})"), placed);
  CHECK(placed == Placement{2, 0, -1});
  CHECK_THROWS_AS(in.read(nlohmann::json::parse(R"({"prefill":"x"})"), placed), nlohmann::json::exception);
  BatchPlan plan;
  in.read(nlohmann::json::parse(R"({"runs":[{"index":1,"n_tokens":5}],"preempts":[3,4]})"), plan);
  CHECK(plan.runs.size() == 1);
  CHECK(plan.preempts == std::vector{3, 4});
  CHECK_THROWS_AS(in.read(nlohmann::json::parse(R"({"runs":5})"), plan), nlohmann::json::exception);
}

// A member that is added to a view and not to its columns would be lost: it changes the size of the struct.
TEST_CASE("decisions: the columns know every member", "[decisions]") {
  CHECK(sizeof(InstanceView) == 128);
  CHECK(sizeof(ClusterView) == 56);
  CHECK(sizeof(SequenceView) == 36);
  CHECK(sizeof(ChunkPrompt) == 16);
  CHECK(sizeof(ChunkView) == 120);
  CHECK(sizeof(ChunkState) == 16);
  CHECK(sizeof(ChunkChoice) == 56);
  CHECK(sizeof(DecodeView) == 32);
  CHECK(sizeof(DisaggView) == 96);
  CHECK(sizeof(DisaggOptions) == 40);
  CHECK(sizeof(ClusterAdmission) == 160);
  CHECK(sizeof(AdmissionOptions) == 32);
  CHECK(sizeof(BatchView) == 64);
  CHECK(sizeof(BlockUse) == 32);
}

}  // namespace
}  // namespace xpyd::testing::decisions_test
