// Prefixes that one instance gets from another: what is computed is less, and what is said the same, whatever becomes
// of the holder, the wire and the time.

#include "base/random.h"
#include "disagg/pool/fetch_policy.h"
#include "disagg/pool/path_policy.h"
#include "disagg/pool/replication.h"
#include "tests/disagg/scene.h"

namespace xpyd::testing::fetch_test {
namespace {

// A tick is a millisecond; the model's first cost is 1 ms a step and .1 ms a token: 48 tokens are worth 7.8 ms.
SimOptions in(const char* policy, double s_per_token = 1e-6) {
  SimOptions options;
  options.conductor.placement = find_placement_policy("round_robin");
  options.conductor.fetch = find_fetch_policy(policy);
  options.conductor.fetch_s_per_token = s_per_token;
  options.checksum = true;
  return options;
}
// The same prompt at one instance after another.
void ask_twice(Scene& scene) {
  scene.ask(1, 60, 4, 1);
  scene.settle();
  scene.ask(2, 60, 4, 1);
}
int cached(const Scene& scene, uint64_t id) { return scene.recorder->choice(id).cached_tokens; }

TEST_CASE("fetch: what another instance has is not computed, in any memory", "[disagg][fetch]") {
  for (const char* scheme : {"paged", "slots", "vattention"}) {
    INFO(scheme);
    SimOptions options = in("always");
    options.scheme = scheme;
    if (scheme != std::string("paged")) options.kv.pool_bytes = 8 << 20;
    options.kv.vattention.share = KvShare::alias;
    Scene scene("2C", options);
    ask_twice(scene);
    scene.settle();
    const FetchStats reader = scene.stats("C1").fetch, holder = scene.stats("C0").fetch;
    const int wanted = scheme == std::string("paged") ? 48 : 59;  // whole blocks of 16; all but the last token
    CHECK(reader.fetches == 1);
    CHECK(reader.tokens == wanted);
    CHECK(reader.failed == 0);
    CHECK(holder.lent == 1);
    CHECK(holder.lent_tokens == wanted);
    CHECK(cached(scene, 2) == wanted);
    CHECK(scene.stats("C1").transfer_bytes == wanted * int64_t(kv_shape(checksum_config(), Dtype::f32).token_bytes()));
  }
}

TEST_CASE("fetch: each of several holders sends a part", "[disagg][fetch]") {
  Scene scene("3C", in("always"));
  ask_twice(scene);
  scene.settle();
  scene.ask(3, 60, 4, 1);
  scene.settle();
  CHECK(scene.stats("C2").fetch.tokens == 48);
  CHECK(scene.stats("C0").fetch.lent_tokens == 48 + 32);
  CHECK(scene.stats("C1").fetch.lent_tokens == 16);
}

TEST_CASE("fetch: what was fetched stays by the row of --replication", "[disagg][fetch][replication]") {
  for (const auto& [policy, fetches] : {std::pair{"side_effect", 1}, {"off", 12}, {"heat", 5}}) {
    INFO(policy);
    SimOptions options = in("always");
    options.conductor.replication = find_replication_policy(policy);
    Scene scene("2C", options);
    // 24 prompts, .8 s apart and a bit, at one instance and the other; the second one has it or gets it. The tenth is
    // the first to find ten reads in ten seconds, less what has left the window: 8 of them are .8 a second.
    for (uint64_t id = 1; id <= 24; ++id) {
      scene.ask(id, 60, 4, 1);
      scene.settle();
      CHECK(cached(scene, id) == (id == 1 ? 0 : 48));
    }
    CHECK(scene.stats("C1").fetch.fetches == fetches);
  }
}

// What D kept of its answers was the second replica: nothing was ever hot enough for a copy.
TEST_CASE("fetch: --replication heat did nothing where D had answered", "[disagg][fetch][replication]") {
  SimOptions options = in("always");
  options.conductor.replication = find_replication_policy("heat");
  Scene scene("2P1D", options);
  for (uint64_t id = 1; id <= 24; ++id) {
    scene.ask(id, 60, 4, 1);
    scene.settle();
    CHECK(cached(scene, id) == (id == 1 ? 0 : 48));
  }
  CHECK(scene.stats("P1").fetch.fetches == 5);  // it was 12: each of its prompts
}

TEST_CASE("heat: reads a second of the last window, whatever else is read", "[disagg][fetch][replication]") {
  PrefixHeat heat;
  Random random(7);
  const uint64_t hot = random.next(), warm = random.next();
  int64_t n = 0;
  for (double now = 100; now < 130; now += .01) {
    if (n++ % 20 == 0) heat.read(std::vector{hot}, now);
    if (n % 200 == 0) heat.read(std::vector{warm}, now);
    heat.read(std::vector{random.next()}, now);
    if (now < 120) continue;
    CHECK(std::abs(heat.reads_s(hot, now) - 5) < .3);
    CHECK(std::abs(heat.reads_s(warm, now) - .5) < .2);
  }
  CHECK(heat.reads_s(random.next(), 130) < .2);
  CHECK(heat.reads_s(hot, 135) > 0);
  CHECK(heat.reads_s(hot, 155) == 0);
  const auto* row = find_replication_policy("heat");
  CHECK(row->keeps({.reads_s = .8, .replicas = 1}));
  CHECK_FALSE(row->keeps({.reads_s = .79, .replicas = 1}));
  CHECK_FALSE(row->keeps({.reads_s = 8, .replicas = 2}));
}

TEST_CASE("fetch: prefill gets back what decode has", "[disagg][fetch]") {
  Scene scene("1P1D", in("always"));
  scene.ask(1, 60, 4, 1);
  scene.settle();
  scene.find("P0")->instance->memory().clear_prefix_cache();
  scene.ask(2, 60, 4, 1);
  scene.settle();
  CHECK(scene.stats("D1").fetch.lent_tokens == 48);
  CHECK(cached(scene, 2) == 48);
}

TEST_CASE("fetch: by cost, only what takes less time than to compute it", "[disagg][fetch]") {
  for (const auto& [policy, s_per_token, fetches] :
       {std::tuple{"never", 1e-6, 0}, {"cost", 1e-6, 1}, {"cost", 1e-3, 0}, {"always", 1e-3, 1}}) {
    INFO(policy << " " << s_per_token);
    Scene scene("2C", in(policy, s_per_token));
    ask_twice(scene);
    scene.settle();
    CHECK(scene.stats("C1").fetch.fetches == fetches);
  }
  const auto* cost = find_fetch_policy("cost");
  FetchView view{.prompt_tokens = 100, .holder_tokens = 50, .bytes_s = 1, .handshake_s = 1, .queue_s = 1, .saved_s = 3};
  CHECK_FALSE(cost->fetches(view));
  view.saved_s = 3.1;
  CHECK(cost->fetches(view));
}

TEST_CASE("fetch: what takes too long is computed, and both sides let go", "[disagg][fetch]") {
  Scene scene("2C", in("cost"));
  scene.ask(1, 60, 4, 1);
  scene.settle();
  scene.hand.holds = true;
  scene.ask(2, 60, 4, 1);
  scene.ticks(60);
  CHECK(scene.n_tokens(2) == 4);  // 2 x 7.8 ms for the fetch, then eight steps
  CHECK(cached(scene, 2) == 0);
  CHECK(scene.stats("C1").fetch.failed == 1);
  CHECK(scene.stats("C1").fetch.regret_s > 0);
  scene.settle();
  CHECK(scene.stats("C0").fetch.expired == 0);  // it was told
  // Prompt after prompt was begun so, and each was late, since what did not come told nothing of the wire.
  scene.ask(3, 60, 4, 2);
  scene.settle();
  scene.hand.holds = true;
  scene.ask(4, 60, 4, 2);
  scene.ticks(60);
  CHECK(scene.n_tokens(4) == 4);
  CHECK(scene.stats("C1").fetch.failed == 1);
}

TEST_CASE("fetch: a holder that dies, changed bytes, a reader that dies", "[disagg][fetch]") {
  {
    Scene scene("2C", in("always"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    scene.hand.holds = true;
    scene.ask(2, 60, 4, 1);
    scene.ticks(5);
    CHECK(scene.n_tokens(2) == 0);
    scene.crash(scene.find("C0")->id, true);
    scene.hand.let_go(true);
    scene.ticks(60);
    CHECK(scene.n_tokens(2) == 4);
    scene.settle();
    CHECK(scene.stats("C1").fetch.failed == 1);
  }
  {
    Scene scene("2C", in("always"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    scene.due = [&](InstanceId, InstanceId, const Message& m) {
      if (auto* lent = std::get_if<KvLent>(const_cast<Message*>(&m)); lent && !lent->source.checksums.empty())
        ++lent->source.checksums[0];
      return scene.clock.seconds;
    };
    scene.ask(2, 60, 4, 1);
    scene.settle();
    CHECK(scene.stats("C1").fetch.failed == 1);
    CHECK(cached(scene, 2) == 0);
    scene.due = nullptr;
  }
  {
    Scene scene("2C", in("always"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    scene.hand.holds = true;
    scene.ask(2, 60, 4, 1);
    scene.ticks(5);
    scene.due = [&](InstanceId from, InstanceId, const Message& m) {  // the holder hears nothing of it
      return from != kConductor && std::holds_alternative<KvRenewed>(m) ? -1 : scene.clock.seconds;
    };
    scene.ticks(500);
    CHECK(scene.stats("C0").fetch.expired == 1);
    scene.hand.let_go();
    scene.settle();
  }
}

// ---- By way of D (path_policy.h).

// Request 1 leaves its prefix at P0 and D2; request 2 is for P1 and D3.
SimOptions relayed(const char* policy) {
  SimOptions options = in(policy);
  options.conductor.path = find_path_policy("relay");
  return options;
}

TEST_CASE("path: the shorter queue, with the hop", "[disagg][fetch][path]") {
  CHECK(find_path_policy("direct")->relays == nullptr);
  const auto relays = find_path_policy("dual")->relays;
  PathView view{.direct_queue_s = 2, .direct_s = 1, .relay_queue_s = 1, .relay_s = 1, .hop_s = 1};
  CHECK_FALSE(relays(view));
  view.hop_s = .9;
  CHECK(relays(view));
  view.relay_queue_s = 1.1;
  CHECK_FALSE(relays(view));
}

TEST_CASE("path: D gets a prefix for P, keeps it, and is sent the rest alone", "[disagg][fetch][path]") {
  for (const char* scheme : {"paged", "slots", "vattention"}) {
    INFO(scheme);
    SimOptions options = relayed("always");
    options.scheme = scheme;
    if (scheme != std::string("paged")) options.kv.pool_bytes = 8 << 20;
    options.kv.vattention.share = KvShare::alias;
    Scene scene("2P2D", options);
    ask_twice(scene);
    scene.settle();
    const FetchStats relay = scene.stats("D3").fetch, reader = scene.stats("P1").fetch;
    const int wanted = scheme == std::string("paged") ? 48 : 59;
    CHECK(relay.relayed == 1);
    CHECK(relay.tokens == wanted);
    CHECK(relay.lent_tokens == wanted);
    CHECK(reader.tokens == wanted);
    CHECK(reader.relayed == 0);
    CHECK(relay.failed + reader.failed == 0);
    CHECK(cached(scene, 2) == wanted);
    if (scheme != std::string("paged")) continue;  // a slot that is read is in nobody else's hands
    const auto token_bytes = int64_t(kv_shape(checksum_config(), Dtype::f32).token_bytes());
    CHECK(scene.stats("P1").transfer_bytes == 60 * token_bytes);  // what it reads, and the rest that it sends
  }
}

TEST_CASE("path: nobody relays what D has, or may not keep", "[disagg][fetch][path]") {
  for (const auto& [topology, replication] :
       {std::pair{"2P1D", "side_effect"}, {"2C", "side_effect"}, {"2P2D", "off"}}) {
    INFO(topology << " " << replication);
    SimOptions options = relayed("always");
    options.conductor.replication = find_replication_policy(replication);
    Scene scene(topology, options);
    ask_twice(scene);
    scene.settle();
    CHECK(cached(scene, 2) == 48);
    for (const auto& [id, node] : scene.nodes) CHECK(node->instance->stats().fetch.relayed == 0);
  }
}

TEST_CASE("path: a relay without room, and one without a holder", "[disagg][fetch][path]") {
  {
    Scene scene("2P2D", relayed("always"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    KvMemory& memory = scene.find("D3")->instance->memory();
    std::vector<KvHandle> others;  // 34 of 40 blocks
    for (const int tokens : {160, 160, 160, 64}) {
      const std::vector<int32_t> other(size_t(tokens), 7);
      others.push_back(memory.reserve(other, others.size() + 9).value().handle);
      REQUIRE(memory.append(others.back(), tokens));
    }
    scene.ask(2, 60, 4, 1);
    scene.ticks(100);
    CHECK(scene.n_tokens(2) == 4);
    CHECK(cached(scene, 2) == 0);
    CHECK(scene.stats("D3").fetch.relayed == 0);
    for (const KvHandle kv : others) memory.free(kv);
    scene.settle();
  }
  // Two holders have a part each; what comes from the second one does not.
  for (const bool first_too : {false, true}) {
    INFO(first_too);
    Scene scene("2P2D", relayed("always"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    scene.hand.holds = true;
    scene.ask(2, 60, 4, 1);
    scene.ticks(5);
    CHECK(scene.n_tokens(2) == 0);
    if (first_too) scene.break_connection(scene.find("P0")->id, scene.find("D3")->id);
    scene.ticks(2);
    scene.hand.let_go(true);
    scene.settle();
    CHECK(scene.stats("D3").fetch.failed == (first_too ? 2 : 1));
    CHECK(cached(scene, 2) == (first_too ? 0 : 32));
  }
}

TEST_CASE("path: a relay that dies, or says nothing", "[disagg][fetch][path]") {
  for (const bool noticed : {true, false}) {
    INFO(noticed);
    Scene scene("2P2D", relayed("always"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    scene.hand.holds = true;
    scene.ask(2, 60, 4, 1);
    scene.ticks(5);
    scene.crash(scene.find("D3")->id, noticed);
    scene.hand.let_go(false);
    scene.ticks(2000);
    CHECK(scene.n_tokens(2) == 4);
    scene.settle();
  }
  for (const bool deaf : {false, true}) {  // what it lends ends with its lease, or when it is told
    INFO(deaf);
    Scene scene("2P2D", relayed("cost"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    const InstanceId relay = scene.find("D3")->id, reader = scene.find("P1")->id;
    scene.due = [&](InstanceId from, InstanceId to, const Message& m) {
      const bool lost = (from == relay && to == reader && std::holds_alternative<KvLent>(m)) ||
                        (deaf && from == reader && to == relay && std::holds_alternative<FetchOver>(m));
      return lost ? -1 : scene.clock.seconds;
    };
    scene.ask(2, 60, 4, 1);
    scene.ticks(100);
    CHECK(scene.n_tokens(2) == 4);
    CHECK(cached(scene, 2) == 0);
    CHECK(scene.stats("D3").fetch.relayed == 1);
    scene.settle();
    CHECK(scene.stats("D3").fetch.expired == deaf);
    scene.due = nullptr;
  }
}

TEST_CASE("path: a reader that dies, or has no more time: the relay lets go", "[disagg][fetch][path]") {
  for (const bool dies : {true, false}) {
    INFO(dies);
    Scene scene("2P2D", relayed(dies ? "always" : "cost"));
    scene.ask(1, 60, 4, 1);
    scene.settle();
    scene.hand.holds = true;
    scene.ask(2, 60, 4, 1);
    scene.ticks(5);
    CHECK(!scene.find("D3")->instance->idle());
    if (dies) scene.crash(scene.find("P1")->id, true);
    scene.ticks(20);  // 2 x 7.8 ms for the fetch
    CHECK(scene.stats("D3").fetch.relayed == 0);
    CHECK(scene.stats("D3").fetch.failed == 2);
    scene.hand.let_go(false);
    scene.settle();
    CHECK(cached(scene, 2) == (dies ? 48 : 0));  // P0 has it
  }
}

// Three families of prompts, from one of two P to the other by way of a D.
TEST_CASE("path: over threads, what is said is what one instance says", "[disagg][fetch][path]") {
  const auto serve = [](TinySetup setup) {
    setup.fetch = "always";
    setup.placement = "round_robin";
    setup.path = find_path_policy("relay");
    auto tiny = std::make_unique<TinyCluster>(setup);
    REQUIRE(tiny->cluster->start().ok());
    for (uint64_t id = 0; id < 30; ++id) {
      std::vector<int32_t> prompt;
      for (int t = 0; t < 40 + 10 * int(id % 4); ++t) prompt.push_back((t * 5 + int(id % 3)) % 96);
      auto request = tiny_request(id, prompt, 5);
      request->ignore_eos = true;
      request->arrival_s = tiny->clock.now();
      REQUIRE(tiny->submit(request).ok());
      if (id % 3 == 2) REQUIRE(tiny->cluster->wait_idle(60));
    }
    REQUIRE(tiny->cluster->wait_idle(60));
    tiny->cluster->stop();
    return tiny;
  };
  const auto alone = serve({});
  for (const char* scheme : {"paged", "slots"})
    for (const StreamKv stream : {StreamKv::layer, StreamKv::request}) {
      INFO(scheme << " " << int(stream));
      const auto tiny = serve({.topology = "2P2D", .scheme = scheme, .stream_kv = stream});
      int64_t relayed = 0, failed = 0;
      for (const auto& instance : tiny->cluster->instances()) {
        relayed += instance->stats().fetch.relayed, failed += instance->stats().fetch.failed;
        const KvStats kv = instance->memory().stats();
        CHECK(kv.free + kv.cached == kv.capacity);
      }
      CHECK(relayed > 0);
      CHECK(failed == 0);
      for (uint64_t id = 0; id < 30; ++id) {
        CHECK(tiny->recorder->choice(id).tokens == alone->recorder->choice(id).tokens);
        CHECK(tiny->recorder->choice(id).logits_hash == alone->recorder->choice(id).logits_hash);
      }
    }
}

}  // namespace
}  // namespace xpyd::testing::fetch_test
