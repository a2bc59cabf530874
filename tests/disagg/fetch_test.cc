// Prefixes that one instance fetches from another. Less is computed and the answers stay the same, whatever happens to
// the holder, the transport and the time.

#include "base/random.h"
#include "disagg/pool/fetch_policy.h"
#include "tests/disagg/scene.h"

namespace xpyd::testing::fetch_test {

// A tick is a millisecond. The model's first cost is 1 ms a step and .1 ms a token, so 48 tokens take 7.8 ms.
SimOptions fetching(const char* policy, double s_per_token = 1e-6) {
  SimOptions options;
  options.conductor.placement = find_placement_policy("round_robin");
  options.conductor.fetch = find_fetch_policy(policy);
  options.conductor.fetch_s_per_token = s_per_token;
  return options;
}
// Sends the same prompt to one instance after another.
void ask_twice(Scene& scene) {
  scene.serve(1, 60, 4, 1);
  scene.ask(2, 60, 4, 1);
}

TEST_CASE("fetch: a prefix that another instance has is fetched and not computed, in any memory", "[disagg][fetch]") {
  for (const char* scheme : {"paged", "slots", "vattention"}) {
    INFO(scheme);
    SimOptions options = fetching("always");
    options.scheme = scheme;
    if (scheme != std::string("paged")) options.kv.pool_bytes = 8 << 20;
    options.kv.vattention.share = KvShare::alias;
    Scene scene("2C", options);
    ask_twice(scene);
    scene.settle();
    const FetchStats reader = scene.stats("C1").fetch, holder = scene.stats("C0").fetch;
    const int wanted = scheme == std::string("paged") ? 48 : 59;  // whole blocks of 16, or all but the last token
    CHECK(reader.fetches == 1);
    CHECK(reader.tokens == wanted);
    CHECK(reader.failed == 0);
    CHECK(holder.lent == 1);
    CHECK(holder.lent_tokens == wanted);
    CHECK(scene.cached(2) == wanted);
    CHECK(scene.stats("C1").transfer_bytes == wanted * int64_t(kv_shape(checksum_config(), Dtype::f32).token_bytes()));
  }
}

TEST_CASE("fetch: a prefill instance fetches back the prefix that a decode instance has", "[disagg][fetch]") {
  Scene scene("1P1D", fetching("always"));
  scene.serve(1, 60, 4, 1);
  scene.memory("P0").clear_prefix_cache();
  scene.serve(2, 60, 4, 1);
  CHECK(scene.stats("D1").fetch.lent_tokens == 48);
  CHECK(scene.cached(2) == 48);
}

TEST_CASE("fetch: by cost, only a prefix that takes less time to fetch than to compute is fetched", "[disagg][fetch]") {
  for (const auto& [policy, s_per_token, fetches] :
       {std::tuple{"never", 1e-6, 0}, {"cost", 1e-6, 1}, {"cost", 1e-3, 0}, {"always", 1e-3, 1}}) {
    INFO(policy << " " << s_per_token);
    Scene scene("2C", fetching(policy, s_per_token));
    ask_twice(scene);
    scene.settle();
    CHECK(scene.stats("C1").fetch.fetches == fetches);
  }
  const auto* cost = find_fetch_policy("cost");
  FetchView view{.prompt_tokens = 100, .holder_tokens = 50, .bytes_s = 2, .handshake_s = 1, .saved_s = 3};
  CHECK_FALSE(cost->fetches(view));
  view.saved_s = 3.1;
  CHECK(cost->fetches(view));
}

TEST_CASE("fetch: a prefix that takes too long to come is computed, and both sides release it", "[disagg][fetch]") {
  Scene scene("2C", fetching("cost"));
  scene.serve(1, 60, 4, 1);
  scene.hand.holds = true;
  scene.ask(2, 60, 4, 1);
  scene.ticks(60);
  CHECK(scene.n_tokens(2) == 4);  // 2 x 7.8 ms for the fetch, then eight steps
  CHECK(scene.cached(2) == 0);
  CHECK(scene.stats("C1").fetch.failed == 1);
  scene.settle();
  CHECK(scene.stats("C0").fetch.expired == 0);  // the reader told it
  // A fetch that does not come says nothing about the transport's rate, so each further prompt once tried again and was
  // late.
  scene.serve(3, 60, 4, 2);
  scene.hand.holds = true;
  scene.ask(4, 60, 4, 2);
  scene.ticks(60);
  CHECK(scene.n_tokens(4) == 4);
  CHECK(scene.stats("C1").fetch.failed == 1);
}

// A fetch of the second prompt's prefix is under way, and does not arrive.
void hold_a_fetch(Scene& scene) {
  scene.serve(1, 60, 4, 1);
  scene.hand.holds = true;
  scene.ask(2, 60, 4, 1);
  scene.ticks(5);
  CHECK(scene.n_tokens(2) == 0);
}

TEST_CASE("fetch: a dead holder costs computing, and a loan to a silent reader expires", "[disagg][fetch]") {
  {
    Scene scene("2C", fetching("always"));
    hold_a_fetch(scene);
    scene.crash(scene.find("C0")->id, true);
    scene.hand.let_go(true);
    scene.ticks(60);
    CHECK(scene.n_tokens(2) == 4);
    scene.settle();
    CHECK(scene.stats("C1").fetch.failed == 1);
  }
  {
    Scene scene("2C", fetching("always"));
    hold_a_fetch(scene);
    scene.due = [&](InstanceId from, InstanceId, const Message& m) {  // the holder gets no renewal
      return from != kConductor && std::holds_alternative<KvRenewed>(m) ? -1 : scene.clock.seconds;
    };
    scene.ticks(500);
    CHECK(scene.stats("C0").fetch.expired == 1);
    scene.hand.let_go();
    scene.settle();
  }
}

}  // namespace xpyd::testing::fetch_test
