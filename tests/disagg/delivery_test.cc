// KV that is delivered while its last transfers are on their way, the measured rate of a transport, and admission by
// reservation.

#include <functional>
#include <set>
#include <thread>

#include "tests/disagg/scene.h"

namespace xpyd::testing::delivery_test {

// While its first event is delivered, another thread does what `meanwhile` says.
struct Sink final : EventSink {
  void on_event(TokenEvent event) override {
    if (meanwhile) std::thread(std::exchange(meanwhile, nullptr)).join();
    finishes.push_back(event.finish);
  }
  std::function<void()> meanwhile;
  std::vector<FinishReason> finishes;
};

// Each thread delivered its own events, so a later decision of another thread could overtake them.
TEST_CASE("delivery: a choice's end from another thread reaches the client behind the tokens before it",
          "[disagg][delivery]") {
  SimCluster sim;
  sim.open({});
  sim.add_all("1C");
  const auto sink = std::make_shared<Sink>();
  sink->meanwhile = [&] { sim.conductor().end_all("stopped"); };
  REQUIRE(sim.conductor().submit(tiny_request(1, std::vector<int32_t>(20, 7), 8), sink).ok());
  sim.ticks(20);
  CHECK(sink->finishes == std::vector{FinishReason::none, FinishReason::abort});
}

TEST_CASE("delivery: transfers may still be on their way, and D takes the KV when it has counted them",
          "[disagg][delivery]") {
  for (StreamKv grain : {StreamKv::layer, StreamKv::chunk, StreamKv::request}) {
    SimOptions options;
    options.stream_kv = grain;
    Scene scene("1P1D", options);
    scene.deliver_and_hold();
    const KvStats p = scene.kv("P0");
    CHECK(p.in_transfer > 0);  // blocks are not free before their transfers are done
    CHECK(scene.stats("P0").queue_prefill_sending == 1);
    scene.hand.let_go();
    scene.ticks(5);
    CHECK(scene.n_tokens(1) > 1);
    scene.settle();
    CHECK(scene.stats("D1").kv_refused == 0);
    CHECK(scene.conductor().stats().conductor.attempts == 1);
  }
}

TEST_CASE(
    "delivery: D waits at most a lease for transfers that never come, and takes KV that has come although its "
    "registration closes late",
    "[disagg][delivery]") {
  for (const bool arrives : {false, true}) {
    Scene scene("1P1D");
    scene.deliver_and_hold();
    if (arrives) {
      scene.hand.close_late = 30;
      scene.hand.let_go();
      scene.ticks(20);
      CHECK(scene.n_tokens(1) == 1);
    }
    scene.ticks(arrives ? 30 : 600);
    CHECK(scene.n_tokens(1) == 12);
    scene.settle();
    CHECK(scene.stats("D1").kv_refused == !arrives);
  }
}

// Whether a request is refused decides the HTTP status, so its client must know when submit() returns.
TEST_CASE("delivery: a refusal reaches its client inside submit(), also while another thread delivers",
          "[disagg][delivery]") {
  SimOptions options;
  options.conductor.admission = find_admission_policy("reserve");
  options.conductor.objectives = {.ttft_s = 1e9, .tbt_s = 1e9};
  options.kv.pool_bytes = 160 * kv_shape(checksum_config(), Dtype::f32).token_bytes();
  SimCluster sim;
  sim.open(std::move(options));
  sim.add_all("1C");
  const auto ask = [&](uint64_t id, int max_tokens, const std::shared_ptr<Sink>& sink) {
    return sim.conductor().submit(tiny_request(id, std::vector<int32_t>(60, int(id)), max_tokens), sink).ok();
  };
  const auto first = std::make_shared<Sink>(), second = std::make_shared<Sink>();
  bool was_refused = false;
  first->meanwhile = [&] {
    was_refused = ask(2, 20, second) && second->finishes == std::vector{FinishReason::refused};
  };
  REQUIRE(ask(1, 90, first));
  sim.ticks(50);
  REQUIRE(was_refused);
  sim.conductor().abort(1);
  sim.ticks(50);
  CHECK(first->finishes.back() == FinishReason::abort);
}

TEST_CASE("delivery: a transport's rate counts each transfer from its start to its end", "[disagg][delivery]") {
  TransportRate rate;
  CHECK(rate.s_per_byte() == 0);
  rate.done(1, 2, 100);
  CHECK(rate.s_per_byte() == Approx(1e-2));
  rate.done(1.5, 3, 100);  // half a second of it overlaps the first one
  CHECK(rate.s_per_byte() == Approx(1e-2));
  for (int i = 0; i < 64; ++i) rate.done(10 + i, 10.5 + i, 100);
  CHECK(rate.s_per_byte() == Approx(5e-3).epsilon(0.03));  // the first two count little
  // An asynchronous transport takes time, although starting a transfer takes none.
  Scene scene("1P1D");
  scene.deliver_and_hold();
  scene.hand.let_go();
  scene.settle();
  const InstanceStats p = scene.stats("P0");
  CHECK(p.transfer_seconds == 0);
  CHECK(p.wire_s_per_byte * double(p.transfer_bytes) > 0.02);
  CHECK(p.wire_s_per_byte * double(p.transfer_bytes) < 0.05);
}

// ---- Admission by reservation: a prompt begins when its blocks are reserved at P and at D.

// Counts the prompts that begin before D has granted room.
struct Watch {
  explicit Watch(Scene& of) : scene(of) {
    scene.due = [this](InstanceId, InstanceId, const Message& m) {
      if (const auto* reserved = std::get_if<KvReserved>(&m)) granted.insert(reserved->attempt);
      if (const auto* reserve = std::get_if<ReserveKv>(&m)) asked.insert(reserve->attempt);
      if (const auto* p = std::get_if<AttemptProgress>(&m); p && p->stage == AttemptProgress::started)
        early += !granted.contains(p->attempt);
      return scene.clock.seconds;
    };
  }
  ~Watch() { scene.due = nullptr; }
  Scene& scene;
  std::set<AttemptId> granted, asked;
  int early = 0;
};

// Pools have 640 tokens in blocks of 16, and steps have 16 tokens. Four sequences of 48 + 100 tokens leave D less and
// less. After 60 ticks D has no room for a prompt of 150.
TEST_CASE("reservation: with reserved blocks no prompt is computed before D has room", "[disagg][reservation]") {
  for (const bool reserve_blocks : {false, true}) {
    INFO(reserve_blocks);
    SimOptions options;
    options.conductor.reserve_blocks = reserve_blocks;
    Scene scene("1P1D", options);
    Watch watch(scene);
    for (uint64_t id = 1; id <= 4; ++id) scene.ask(id, 48, 100, int(id));
    scene.ticks(60);
    CHECK(watch.early == (reserve_blocks ? 0 : 4));
    for (uint64_t id = 5; id <= 7; ++id) scene.ask(id, 150, 4, int(id));
    scene.ticks(34);
    CHECK(scene.n_tokens(4) < 100);
    CHECK(scene.stats("P0").prompt_tokens == 4 * 48 + (reserve_blocks ? 0 : 3 * 150));
    CHECK(watch.early == (reserve_blocks ? 0 : 7));
    CHECK(scene.stats("P0").waiting == (reserve_blocks ? 3 : 0));
    // D is asked for what can begin soon: two steps and one prompt.
    CHECK(watch.asked.size() == (reserve_blocks ? 5 : 7));
    CHECK(scene.kv("P0").reserved_blocks == (reserve_blocks ? 10 : 0));
    scene.settle();
    CHECK(watch.early == (reserve_blocks ? 0 : 7));
  }
}

}  // namespace xpyd::testing::delivery_test
