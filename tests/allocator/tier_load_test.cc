// --kv-load cost: a tier's KV is loaded where its owner says that it is worth the time, which is learnt from loads.
#include <thread>

#include "allocator/kv_plan.h"
#include "allocator/tiered.h"
#include "base/device.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::tier_load_test {
namespace {

TEST_CASE("tiers: what is not worth its load is computed", "[tiers][tier_load]") {
  struct Asked {
    int from, to, tokens;
    double load_s;
  };
  for (const bool by_cost : {true, false}) {
    KvOptions options = tiny_options(4, 16, false, KvOrder::layer_major, 64);
    VirtualClock clock;
    options.clock = &clock;
    options.tiers = {.host_bytes = 16 * 4 * kTinyShape.token_bytes(), .block_tokens = 4, .load_by_cost = by_cost};
    const auto memory = make_tiered(make_ranked_memory("paged", options, {}).value(), options).value();
    std::vector<Asked> asked;
    bool worth = true;
    memory->loads_if([&](int from, int to, int tokens, double load_s) {
      asked.push_back({from, to, tokens, load_s});
      return worth;
    });
    std::vector<int32_t> prompt;
    for (int i = 0; i < 21; ++i) prompt.push_back(i);
    const auto run = [&] {  // tokens that were not computed
      const KvReservation r = memory->reserve(prompt, 0).value();
      clock.seconds += .01;
      while (!memory->ready(r.handle)) std::this_thread::yield();
      const int cached = memory->written_tokens(r.handle);
      CHECK(wrong_rows(memory->view(r.handle), std::span(prompt).first(size_t(cached)), 0) == 0);
      REQUIRE(memory->append(r.handle, 21 - cached));
      write_rows(memory->view(r.handle), prompt, 0, cached);
      memory->written(r.handle, std::span(prompt).subspan(size_t(cached)));
      memory->free(r.handle);
      while (memory->copying()) memory->poll();
      return cached;
    };
    CHECK(run() == 0);
    CHECK(run() == 20);
    CHECK(run() == 20);
    worth = false;
    CHECK(run() == (by_cost ? 0 : 20));
    CHECK(run() == (by_cost ? 0 : 20));
    clock.seconds += 2;
    CHECK(run() == (by_cost ? 0 : 20));
    worth = true;
    CHECK(run() == 20);
    memory->check_invariants();
    if (!by_cost) {
      CHECK(asked.empty());
      continue;
    }
    REQUIRE(asked.size() == 6);
    for (const Asked& a : asked) CHECK((a.from == 0 && a.to == 20 && a.tokens == 21));
    CHECK(asked[0].load_s == 0);  // nobody knows
    CHECK(asked[1].load_s > 0);
    // It is tried again some day, however often it is asked for.
    CHECK(asked[3].load_s == asked[2].load_s);
    CHECK(asked[4].load_s == asked[3].load_s);
    CHECK(asked[5].load_s == Approx(.99 * asked[4].load_s));
  }
}

}  // namespace
}  // namespace xpyd::testing::tier_load_test
