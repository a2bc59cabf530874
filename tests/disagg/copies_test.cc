// --decode-copies: a second decode instance has a copy of a prompt's KV. It costs bytes and memory and no time of the
// request, and when the first one dies the answer continues on the copy.

#include "tests/disagg/scene.h"

namespace xpyd::testing::copies_test {

constexpr int kPrompt = 60, kWhole = 48;  // tokens; of whole blocks of 16

SimOptions copying(int copies, bool pull = false) {
  SimOptions options = in("prefill_first", pull);
  options.conductor.placement = find_placement_policy("round_robin");  // the first request is decoded by D1
  options.conductor.decode_copies = copies;
  return options;
}
int64_t bytes_of(int tokens) { return tokens * int64_t(kv_shape(checksum_config(), Dtype::f32).token_bytes()); }

TEST_CASE("copies: when D dies, the answer continues on its copy, and the prompt is not computed again",
          "[disagg][copies]") {
  for (const bool pull : {false, true})
    for (const int copies : {1, 2}) {
      INFO(pull << " " << copies);
      Scene scene("1P2D", copying(copies, pull));
      scene.ask(1, kPrompt, 40, 1);
      for (int i = 0; i < 300 && scene.n_tokens(1) < 10; ++i) scene.tick();
      REQUIRE(scene.n_tokens(1) >= 10);
      CHECK(scene.stats("D2").fetch.copies == copies - 1);
      CHECK(scene.stats("D2").fetch.copy_bytes == (copies - 1) * bytes_of(kWhole));
      CHECK(scene.stats("D2").fetch.fetches == 0);
      scene.memory("P0").clear_prefix_cache();
      scene.crash(scene.find("D1")->id, true);
      scene.settle();
      CHECK(scene.conductor().stats().conductor.replaced_choices == 1);
      // Only the prompt's last block is computed again, beside the answer's tokens, whose KV was at D1 alone.
      CHECK(scene.stats("P0").prompt_tokens == (copies == 1 ? 2 * kPrompt : kPrompt));
      CHECK(scene.stats("D2").prompt_tokens == (copies == 1 ? 0 : kPrompt - kWhole));
    }
}

TEST_CASE("copies: the next turn of a conversation finds its KV on either D", "[disagg][copies]") {
  for (const int copies : {1, 2}) {
    INFO(copies);
    Scene scene("1P2D", copying(copies));
    scene.serve(1, kPrompt, 4, 1);
    const int64_t before = scene.stats("P0").transfer_bytes;
    CHECK(before == bytes_of(kPrompt));
    scene.serve(2, kPrompt, 4, 1);  // decoded by D2
    CHECK(scene.stats("P0").transfer_bytes - before == bytes_of(copies == 1 ? kPrompt : kPrompt - kWhole));
    CHECK(scene.stats("D1").fetch.copies == 0);  // the second copy is there already
    CHECK(scene.stats("D1").fetch.copies_dropped == 0);
  }
}

TEST_CASE("copies: one that finds no room or does not arrive is dropped, and the request does not wait for it",
          "[disagg][copies]") {
  const auto ticks_until = [](Scene& scene, int tokens) {
    int n = 0;
    while (n < 300 && scene.n_tokens(1) < tokens) scene.tick(), ++n;
    return n;
  };
  Scene plain("1P2D", copying(1));
  plain.ask(1, kPrompt, 20, 1);
  const int without = ticks_until(plain, 20);
  {
    Scene scene("1P2D", copying(2));
    KvMemory& full = scene.memory("D2");
    std::vector<KvHandle> others;
    while (full.stats().available() > 0) {
      others.push_back(full.reserve(std::vector<int32_t>(40, 7), 0).value().handle);
      REQUIRE(full.append(others.back(), std::min(10, full.stats().available()) * full.stats().block_tokens));
    }
    scene.ask(1, kPrompt, 20, 1);
    CHECK(ticks_until(scene, 20) == without);
    CHECK(scene.stats("D2").fetch.copies_dropped == 1);
    CHECK(scene.stats("P0").fetch.lent == 0);
    for (const KvHandle other : others) full.free(other);
    scene.settle();
  }
  Scene scene("1P2D", copying(2));
  scene.ask(1, kPrompt, 20, 1);
  scene.until_sent<KvLent>();
  scene.hand.holds = true;  // D1 has the KV; D2's read does not arrive
  CHECK(ticks_until(scene, 20) < without);
  CHECK(scene.kv("D2").active > 0);
  scene.crash(scene.find("P0")->id, true);
  scene.hand.let_go(true);
  scene.settle();
  CHECK(scene.stats("D2").fetch.copies_dropped == 1);
  CHECK(scene.stats("D2").fetch.copy_bytes == 0);
}

TEST_CASE("copies: a request whose instances are all lost waits for others", "[disagg][copies]") {
  Scene scene("1P2D", copying(2));
  scene.ask(1, kPrompt, 20, 1);
  for (int i = 0; i < 300 && scene.n_tokens(1) < 10; ++i) scene.tick();
  for (const char* name : {"P0", "D1", "D2"}) scene.crash(scene.find(name)->id, true);
  for (int i = 0; i < 1000; ++i) scene.tick();
  scene.add_all("1P1D");
  scene.settle();
  CHECK(scene.n_tokens(1) == 20);
}

}  // namespace xpyd::testing::copies_test
