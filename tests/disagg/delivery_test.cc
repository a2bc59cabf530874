// KV that is delivered while its last posts are on their way; what the wire costs; and what the
// conductor knows of caches that are far away.

#include <functional>
#include <set>

#include "tests/disagg/scene.h"

namespace xpyd::testing::delivery_test {
namespace {

SimOptions in(const char* disagg) {
  SimOptions options;
  options.conductor.disagg = find_disagg_policy(disagg);
  return options;
}

TEST_CASE("delivery: posts may be on their way, and D takes the KV when it has counted them", "[disagg][delivery]") {
  for (StreamKv grain : {StreamKv::layer, StreamKv::chunk, StreamKv::request}) {
    SimOptions options;
    options.stream_kv = grain;
    Scene scene("1P1D", options);
    scene.deliver_and_hold();
    const KvStats p = scene.find("P0")->instance->memory().stats();
    CHECK(p.in_transfer > 0);  // not free before the posts are done
    CHECK(scene.stats("P0").queue_prefill_sending == 1);
    scene.hand.let_go();
    scene.ticks(5);
    CHECK(scene.n_tokens(1) > 1);
    scene.settle();
    CHECK(scene.stats("D1").kv_refused == 0);
    CHECK(scene.conductor().totals().attempts == 1);
  }
}

// Its places were counted instead: the KV stayed at P, whose memory it filled, and nobody was said to wait at D.
TEST_CASE("delivery: KV comes while D's batch is full, and waits there", "[disagg][delivery]") {
  for (const char* order : {"prefill_first", "decode_first"}) {
    SimOptions options = in(order);
    options.max_batch = 2;
    Scene scene("1P1D", options);
    for (uint64_t id : {1, 2}) scene.ask(id, 40, 100, int(id));
    scene.ticks(30);
    for (uint64_t id : {3, 4}) scene.ask(id, 40, 4, int(id));
    scene.ticks(30);
    CHECK(scene.stats("D1").running == 2);
    CHECK(scene.stats("D1").waiting == 2);
    CHECK(scene.stats("P0").queue_prefill_sending == 0);
    CHECK(scene.find("P0")->instance->memory().stats().active == 0);
    CHECK(scene.n_tokens(2) < 100);
    scene.settle();
  }
}

TEST_CASE("delivery: a post that fails behind it is a recompute, at once", "[disagg][delivery]") {
  for (const char* order : {"prefill_first", "decode_first"}) {
    Scene scene("1P1D", in(order));
    if (*order == 'd') {
      scene.hand.holds = true;
      scene.ask(1, 60, 12, 1);
      scene.ticks(40);
      CHECK(scene.n_tokens(1) == 0);
    } else {
      scene.deliver_and_hold();
    }
    scene.hand.let_go(true);
    scene.ticks(30);  // of a lease's 400
    CHECK(scene.n_tokens(1) == 12);
    scene.settle();
    CHECK(scene.stats("D1").kv_refused == 1);
    CHECK(scene.conductor().totals().attempts == 1);
  }
}

TEST_CASE("delivery: posts that never come are waited for no longer than a lease", "[disagg][delivery]") {
  Scene scene("1P1D");
  scene.deliver_and_hold();
  scene.ticks(600);
  CHECK(scene.n_tokens(1) == 12);
  scene.settle();
  CHECK(scene.stats("D1").kv_refused == 1);
}

TEST_CASE("delivery: what has arrived whole is taken, however long its window takes to close", "[disagg][delivery]") {
  Scene scene("1P1D");
  scene.deliver_and_hold();
  scene.hand.close_late = 30;
  scene.hand.let_go();
  scene.ticks(20);
  CHECK(scene.n_tokens(1) == 1);
  scene.ticks(30);
  CHECK(scene.n_tokens(1) == 12);
  scene.settle();
  CHECK(scene.stats("D1").kv_refused == 0);
}

TEST_CASE("delivery: a client that goes does not wait for posts", "[disagg][delivery]") {
  Scene scene("1P1D");
  scene.deliver_and_hold();
  scene.conductor().abort(1);
  scene.ticks(10);
  CHECK(scene.recorder->choice(1).finish == FinishReason::abort);
  scene.hand.let_go();
  scene.ticks(800);
  CHECK(scene.check_memory(true) == "");
}

TEST_CASE("delivery: a P that dies behind it costs a recompute, and no token", "[disagg][delivery]") {
  for (bool noticed : {true, false}) {
    Scene scene("2P1D");
    scene.deliver_and_hold();
    for (const char* name : {"P0", "P1"})
      if (scene.stats(name).queue_prefill_sending == 1) {
        scene.crash(scene.find(name)->id, noticed);
        break;
      }
    scene.hand.holds = false;
    scene.settle();
    CHECK(scene.stats("D2").kv_refused == 1);  // what was delivered is D's to finish
    // The conductor may hear of the end before D has said that it goes on.
    CHECK(scene.conductor().totals().failed_attempts == noticed);
  }
}

// What the two say to each other comes from another process: a place that cannot be is a failed
// attempt, placed anew, and nobody reads beyond a list.
class Misled final : public Scene {
 public:
  using Scene::Scene;
  void send(InstanceId from, InstanceId to, Message message) override {
    if (auto* reserved = std::get_if<KvReserved>(&message); reserved && wrong)
      std::exchange(wrong, nullptr)(reserved->destination);
    if (auto* offered = std::get_if<KvOffered>(&message); offered && wrong)
      std::exchange(wrong, nullptr)(offered->source);
    if (auto* failed = std::get_if<AttemptFailed>(&message)) refused += failed->why.starts_with("its place for KV");
    const auto* start = std::get_if<StartRequest>(&message);
    const auto* offered = std::get_if<KvOffered>(&message);
    std::optional<Envelope> early;
    const auto promise = [](AttemptId attempt) {
      KvReserved reserved{.attempt = attempt};
      reserved.destination.blocks = {0};
      return reserved;
    };
    if (unasked && start) early = {start->decode, to, promise(start->attempt)};
    if (unasked && offered) early = {to, from, promise(offered->attempt)};
    if (const auto* delivered = std::get_if<KvDelivered>(&message); delivered && twice) {
      KvDelivered again = *delivered;
      again.posts += 5;
      early = {from, to, std::move(again)};
    }
    Scene::send(from, to, std::move(message));
    if (early) Scene::send(early->from, early->to, std::move(early->message));
  }
  std::function<void(KvPlace&)> wrong;  // changes the next place that is told
  bool unasked = false;                 // room is promised before it is asked for
  bool twice = false;                   // what is delivered is said again, of more posts
  int refused = 0;
};

const std::pair<const char*, void (*)(KvPlace&)> kWrongPlaces[] = {
    {"too few blocks", [](KvPlace& place) { place.blocks.pop_back(); }},
    {"one block", [](KvPlace& place) { place.blocks.resize(1); }},
    {"a block below 0", [](KvPlace& place) { place.blocks[1] = -1; }},
    {"a block that is none", [](KvPlace& place) { place.blocks.back() = 1 << 30; }},
    {"a slot that is none", [](KvPlace& place) { place.blocks.clear(), place.slot = 1 << 30; }},
    {"a slot below 0", [](KvPlace& place) { place.blocks.clear(), place.slot = -1; }},
    {"a slot where there are blocks", [](KvPlace& place) { place.blocks.clear(); }},
    {"more cached than there is", [](KvPlace& place) { place.cached_tokens = 61; }},
    {"cached below 0", [](KvPlace& place) { place.cached_tokens = -1; }},
};

TEST_CASE("delivery: a promise of room that is none is a failed attempt", "[disagg][delivery]") {
  for (const char* disagg : {"prefill_first", "decode_first"})
    for (const auto& [what, wrong] : kWrongPlaces) {
      INFO(disagg << ", " << what);
      Misled scene("1P1D", in(disagg));
      scene.wrong = wrong;
      scene.ask(1, 60, 12, 1);
      scene.settle();
      CHECK(scene.refused == 1);
    }
}

TEST_CASE("delivery: a promise of room that nobody asked for is not heard", "[disagg][delivery]") {
  for (const bool pull : {false, true}) {
    INFO("pull " << pull);
    SimOptions options = in("prefill_first");
    options.conductor.disagg_options.pull = pull;
    Misled scene("1P1D", options);
    scene.unasked = true;
    scene.ask(1, 60, 12, 1);
    scene.settle();
    CHECK(scene.stats("D1").kv_refused == 0);
    CHECK(scene.stats(pull ? "D1" : "P0").transfers == 1);
    CHECK(scene.conductor().totals().failed_attempts == 0);
  }
}

TEST_CASE("delivery: what is said again of one that is delivered is not heard", "[disagg][delivery]") {
  for (const char* disagg : {"prefill_first", "decode_first"}) {
    INFO(disagg);
    Misled scene("1P1D", in(disagg));
    scene.twice = true;
    scene.hand.close_late = 5;  // both are read before the first is done
    scene.ask(1, 60, 12, 1);
    scene.settle();
    CHECK(scene.stats("D1").kv_refused == 0);
    CHECK(scene.conductor().totals().failed_attempts == 0);
  }
}

TEST_CASE("delivery: an offer of KV that is none is a failed attempt", "[disagg][delivery]") {
  for (const auto& [what, wrong] : kWrongPlaces) {
    INFO(what);
    SimOptions options = in("prefill_first");
    options.conductor.disagg_options.pull = true;
    Misled scene("1P1D", options);
    scene.wrong = wrong;
    scene.ask(1, 60, 12, 1);
    scene.settle();
    CHECK(scene.refused == 1);
  }
}

TEST_CASE("delivery: a wire's rate is from post to done", "[disagg][delivery]") {
  WireRate rate;
  CHECK(rate.s_per_byte() == 0);
  rate.done(1, 2, 100);
  CHECK(rate.s_per_byte() == Approx(1e-2));
  rate.done(1.5, 3, 100);  // of this one half a second is the first one's, too
  CHECK(rate.s_per_byte() == Approx(1e-2));
  for (int i = 0; i < 64; ++i) rate.done(10 + i, 10.5 + i, 100);
  CHECK(rate.s_per_byte() == Approx(5e-3));  // the first two are forgotten
  // What an asynchronous wire takes is not free, though posting takes no time.
  Scene scene("1P1D");
  scene.deliver_and_hold();
  scene.hand.let_go();
  scene.settle();
  const InstanceStats p = scene.stats("P0");
  CHECK(p.transfer_seconds == 0);
  CHECK(p.wire_s_per_byte * double(p.transfer_bytes) > 0.02);
  CHECK(p.wire_s_per_byte * double(p.transfer_bytes) < 0.05);
}

SimOptions far() {
  SimOptions options;
  options.far_caches = true;
  options.kv.block_tokens = 4;
  options.conductor.placement = find_placement_policy("prefix_aware");
  return options;
}

TEST_CASE("far caches: a prompt goes to the instance that reports its prefix", "[disagg][delivery]") {
  Scene scene("3P1D", far());
  for (uint64_t id = 1; id <= 3; ++id) scene.ask(id, 60, 4, int(id));  // one each
  scene.settle();
  std::map<std::string, int64_t> hits;
  for (const char* name : {"P0", "P1", "P2"}) {
    const SimCluster::Node& node = *scene.find(name);
    CHECK(scene.conductor().known_blocks(node.id) == 15);
    hits[name] = scene.stats(name).kv.prefix_hit_tokens;
  }
  for (uint64_t id = 4; id <= 6; ++id) {
    scene.ask(id, 60, 4, 7 - int(id));
    scene.settle();
    CHECK(scene.recorder->choice(id).cached_tokens == 56);  // never the last token's block
  }
  for (const char* name : {"P0", "P1", "P2"}) CHECK(scene.stats(name).kv.prefix_hit_tokens == hits[name] + 56);
}

TEST_CASE("far caches: what is evicted or cleared is reported, and a late report costs time alone",
          "[disagg][delivery]") {
  Scene scene("2P1D", far());
  scene.ask(1, 60, 4, 1);
  scene.settle();
  SimCluster::Node* holder = nullptr;
  for (const char* name : {"P0", "P1"})
    if (scene.conductor().known_blocks(scene.find(name)->id) > 0) holder = scene.find(name);
  REQUIRE(holder);
  // Cleared, and the report is late: the prompt goes there all the same.
  scene.due = [&](InstanceId, InstanceId, const Message& m) {
    return std::holds_alternative<CacheReport>(m) ? scene.clock.seconds + 0.2 : scene.clock.seconds;
  };
  scene.send(kConductor, holder->id, ClearPrefixCache{});
  scene.ticks(20);
  CHECK(scene.conductor().known_blocks(holder->id) == 15);
  const int64_t before = holder->instance->stats().prompt_tokens;
  scene.ask(2, 60, 4, 1);
  scene.ticks(60);
  CHECK(scene.recorder->choice(2).cached_tokens == 0);
  CHECK(holder->instance->stats().prompt_tokens == before + 60);
  scene.due = nullptr;
  scene.settle();
  CHECK(scene.conductor().known_blocks(holder->id) == 15);  // gone, and computed again
  scene.send(kConductor, holder->id, ClearPrefixCache{});
  scene.ticks(20);
  CHECK(scene.conductor().known_blocks(holder->id) == 0);
}

}  // namespace
}  // namespace xpyd::testing::delivery_test
