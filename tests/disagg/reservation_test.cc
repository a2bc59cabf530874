// Admission by reservation: a prompt begins when P's room and D's are held, and what is held is let go on both sides,
// whoever dies, leaves or is silent.
#include <set>

#include "tests/disagg/scene.h"

namespace xpyd::testing::reservation_test {
namespace {

// Pools of 640 tokens in blocks of 16, of which four sequences of 48 and 100 tokens leave D less and less; steps of 16
// tokens. Where such four decode for 60 ticks, D has no room for a prompt of 150.
SimOptions in(bool escrow) {
  SimOptions options;
  options.conductor.escrow = escrow;
  return options;
}

// Prompts that begin, and rooms that D grants, as they are told.
struct Watch {
  explicit Watch(Scene& of) : scene(of) {
    scene.due = [this](InstanceId, InstanceId, const Message& m) {
      if (const auto* reserved = std::get_if<KvReserved>(&m)) granted.insert(reserved->attempt);
      if (const auto* reserve = std::get_if<ReserveKv>(&m)) asked.insert(reserve->attempt);
      if (const auto* p = std::get_if<AttemptProgress>(&m); p && p->stage == AttemptProgress::started)
        early += !granted.contains(p->attempt);
      return scene.clock.seconds + (std::holds_alternative<KvReserved>(m) ? granted_late_s : 0);
    };
  }
  ~Watch() { scene.due = nullptr; }
  Scene& scene;
  double granted_late_s = 0;
  std::set<AttemptId> granted, asked;
  int early = 0;
};

KvStats at(Scene& scene, const char* name) { return scene.find(name)->instance->memory().stats(); }

// Nobody owns anything any more.
void rest(Scene& scene) {
  for (int i = 0; i < 20000 && !scene.conductor().wait_idle(0); ++i) scene.tick();
  scene.ticks(800);
  CHECK(scene.check_memory(true) == "");
}

TEST_CASE("reservation: no prompt is computed that D has no room for", "[disagg][reservation]") {
  for (const bool escrow : {false, true}) {
    INFO(escrow);
    Scene scene("1P1D", in(escrow));
    Watch watch(scene);
    for (uint64_t id = 1; id <= 4; ++id) scene.ask(id, 48, 100, int(id));
    scene.ticks(60);
    CHECK(watch.early == (escrow ? 0 : 4));
    for (uint64_t id = 5; id <= 7; ++id) scene.ask(id, 150, 4, int(id));
    scene.ticks(34);
    CHECK(scene.n_tokens(4) < 100);
    CHECK(scene.stats("P0").prompt_tokens == 4 * 48 + (escrow ? 0 : 3 * 150));
    CHECK(watch.early == (escrow ? 0 : 7));
    CHECK(scene.stats("P0").waiting == (escrow ? 3 : 0));
    // D is asked for what can begin soon: two steps and one prompt.
    CHECK(watch.asked.size() == (escrow ? 5 : 7));
    CHECK(at(scene, "P0").escrowed == (escrow ? 10 : 0));
    scene.settle();
    CHECK(watch.early == (escrow ? 0 : 7));
  }
}

TEST_CASE("reservation: clients who leave while D is full cost no computation", "[disagg][reservation]") {
  for (const bool escrow : {false, true}) {
    INFO(escrow);
    Scene scene("1P1D", in(escrow));
    Watch watch(scene);
    for (uint64_t id = 1; id <= 4; ++id) scene.ask(id, 48, 100, int(id));
    scene.ticks(60);
    for (uint64_t id = 5; id <= 7; ++id) scene.ask(id, 150, 4, int(id));
    scene.ticks(34);
    for (uint64_t id = 5; id <= 7; ++id) scene.conductor().abort(id);
    rest(scene);
    for (uint64_t id = 5; id <= 7; ++id) {
      const Recorder::Choice choice = scene.recorder->choice(id);
      CHECK((choice.ends == 1 && choice.finish == FinishReason::abort));
      CHECK(choice.tokens.size() == (escrow ? 0 : 1));
    }
    CHECK(scene.stats("P0").prompt_tokens == 4 * 48 + (escrow ? 0 : 3 * 150));
  }
}

TEST_CASE("reservation: what is pinned is hit, and what is set aside is there", "[disagg][reservation]") {
  Scene scene("1P1D", in(true));
  scene.ask(1, 60, 4, 9);
  scene.settle();
  for (uint64_t id = 2; id <= 5; ++id) scene.ask(id, 48, 100, int(id));
  scene.ticks(80);
  scene.ask(6, 150, 4, 9);  // 48 tokens are cached, and D has no room for the others
  scene.ticks(5);
  KvMemory& memory = scene.find("P0")->instance->memory();
  CHECK(memory.stats().escrowed == 7);
  CHECK(memory.stats().active == 3);
  CHECK(memory.stats().evictions == 0);  // for nobody yet
  // Somebody else takes all that he can.
  std::vector<int32_t> other(150, 77);
  std::vector<KvHandle> taken;
  for (int available = memory.stats().available(); available > 0; available = memory.stats().available()) {
    taken.push_back(memory.reserve(other, 1).value().handle);
    REQUIRE(memory.append(taken.back(), std::min(9, available) * 16));
  }
  CHECK_FALSE(memory.append(taken.back(), memory.written_tokens(taken.back()) + 160));
  CHECK(memory.stats().cached + memory.stats().free == 7);
  for (int i = 0; i < 400 && scene.n_tokens(6) < 4; ++i) scene.tick();
  CHECK(scene.n_tokens(6) == 4);
  CHECK(scene.recorder->choice(6).cached_tokens == 48);
  for (KvHandle kv : taken) memory.free(kv);
  scene.settle();
}

// In both: P has set room aside for request 5. `granted`: D has, too, and P has not heard of it.
void hold_one(Scene& scene, Watch& watch, bool granted) {
  if (granted)
    watch.granted_late_s = 0.1;
  else
    for (uint64_t id = 1; id <= 4; ++id) scene.ask(id, 48, 100, int(id));
  scene.ticks(60);
  scene.ask(5, 150, 4, 5);
  scene.ticks(5);
  REQUIRE(at(scene, "P0").escrowed == 10);
  REQUIRE(scene.n_tokens(5) == 0);
  REQUIRE(watch.granted.size() == (granted ? 1 : 4));
  REQUIRE(watch.asked.size() == (granted ? 1 : 5));
}

TEST_CASE("reservation: both sides let go, whoever dies, stops, leaves or is cut off in between",
          "[disagg][reservation]") {
  enum Blow { kill_p, lose_p, kill_d, lose_d, stop_p, stop_d, cut, mute, kBlows };
  for (int blow = kill_p; blow < kBlows; ++blow)
    for (const bool granted : {false, true}) {
      INFO(blow << " " << granted);
      Scene scene("1P1D", in(true));
      Watch watch(scene);
      hold_one(scene, watch, granted);
      const Role role = blow == kill_p || blow == lose_p || blow == stop_p ? Role::prefill : Role::decode;
      SimCluster::Node& hit = *scene.find(role == Role::prefill ? "P0" : "D1");
      switch (blow) {
        case kill_p:
        case kill_d: scene.crash(hit.id, true); break;
        case lose_p:
        case lose_d: scene.crash(hit.id, false); break;  // until its lease has ended
        case stop_p:
        case stop_d: hit.stopped_until_s = scene.clock.seconds + 1.3; break;
        case cut: scene.break_connection(0, 1); break;
        case mute:
          scene.due = [&](InstanceId from, InstanceId, const Message& m) {  // D hears nothing of P
            return from == 0 && std::holds_alternative<KvRenewed>(m) ? -1 : scene.clock.seconds;
          };
          scene.ticks(650);
          break;
      }
      watch.granted_late_s = 0;
      if (blow < stop_p) scene.add(role);
      if (blow == stop_p || blow == stop_d) {
        scene.ticks(1350);
        scene.crash(hit.id, false);  // the zombie notices
        scene.add(role);
      }
      if (blow == mute) scene.due = nullptr;
      scene.settle();
      for (auto& [id, node] : scene.nodes) CHECK(node->instance->stats().kv.escrowed == 0);
    }
}

TEST_CASE("reservation: an abort and a deadline end it on both sides", "[disagg][reservation]") {
  for (const bool granted : {false, true})
    for (const bool late : {false, true}) {
      INFO(granted << late);
      SimOptions options = in(true);
      options.step_tokens = 80;  // D is asked for both prompts
      Scene scene("1P1D", options);
      Watch watch(scene);
      hold_one(scene, watch, granted);
      auto request = tiny_request(6, std::vector<int32_t>(70, 3), 4);
      request->deadline_s = late ? scene.clock.seconds + 0.02 : 0;
      REQUIRE(scene.conductor().submit(request, scene.recorder).ok());
      scene.ticks(5);
      CHECK(at(scene, "P0").escrowed == 10 + 5);
      if (!late) scene.conductor().abort(6);
      scene.ticks(30);
      CHECK(at(scene, "P0").escrowed == 10);
      CHECK(scene.recorder->choice(6).finish == (late ? FinishReason::timeout : FinishReason::abort));
      watch.granted_late_s = 0;
      rest(scene);
      CHECK(scene.n_tokens(5) == 4);
    }
}

TEST_CASE("reservation: nobody starves, and nobody waits in a circle", "[disagg][reservation]") {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    INFO(seed);
    Random random(seed);
    SimOptions options = in(true);
    options.kv.pool_bytes = (11 + random.below(8)) * 16 * kv_shape(checksum_config(), Dtype::f32).token_bytes();
    options.conductor.fetch = find_fetch_policy(seed % 2 ? "always" : "never");
    options.conductor.fetch_s_per_token = 1e-6;
    options.conductor.disagg = find_disagg_policy(seed % 3 ? "prefill_first" : "decode_first");
    options.conductor.disagg_options.pull = seed % 4 == 0;
    options.conductor.placement = find_placement_policy("round_robin");
    options.checksum = seed % 5 < 2;
    Scene scene(seed % 3 == 1 ? "2P1D" : "2P2D", options);
    int64_t most = 0;
    for (uint64_t id = 1; id <= 40; ++id) {
      scene.ask(id, random.below(6) == 0 ? 150 : 17 + int(random.below(90)), 1 + int(random.below(10)),
                int(random.below(5)));
      scene.ticks(int(random.below(12)));
      for (auto& [at, node] : scene.nodes) most = std::max<int64_t>(most, node->instance->memory().stats().escrowed);
      if (id % 8 == 0) CHECK(scene.check_memory(false) == "");
    }
    scene.settle();
    CHECK(most > 0);
  }
}

TEST_CASE("reservation: one logits hash, whatever the order, the wire and the memory", "[disagg][reservation]") {
  const uint64_t expected =
      run_ragged({.topology = "1C", .scheme = "contiguous", .batching = "static", .prefix_cache = false}).hash;
  const struct {
    const char* disagg;
    bool pull;
  } orders[] = {{"prefill_first", false}, {"prefill_first", true}, {"decode_first", false}};
  for (const auto& [disagg, pull] : orders)
    for (const char* transport : {"local", "handoff"})
      for (const char* scheme : {"paged", "vattention", "slots"})
        for (const int step : {7, 64}) {
          if (pull && transport == std::string("handoff")) continue;  // refused
          TinySetup setup{.topology = step == 7 ? "1P1D" : "2P1D", .scheme = scheme, .transport = transport};
          setup.disagg = disagg;
          setup.disagg_options.pull = pull;
          setup.step_tokens = step;
          setup.escrow = true;
          setup.max_batch = 3;
          setup.pool_bytes = scheme == std::string("slots") ? 3 << 20 : 1 << 18;
          INFO(setup.describe());
          REQUIRE(run_ragged(setup).hash == expected);
        }
}
}  // namespace
}  // namespace xpyd::testing::reservation_test
