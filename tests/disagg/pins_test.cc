// Prefixes that are pinned, and hints of what will be asked for: what stays, what goes, and when.
#include "disagg/pool/pins.h"

#include "tests/allocator/kv_fixture.h"
#include "tests/disagg/scene.h"

namespace xpyd::testing::pins_test {
namespace {

// A pool of 40 blocks of 16 tokens; the longest request has 10.
std::vector<int32_t> prompt(int length, int family) {  // as Scene::ask() makes it
  std::vector<int32_t> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((i * 5 + family * 17) % 251);
  return tokens;
}

PinPrefix pin(uint64_t id, int length, int family, bool soft = false, double ttl_s = 0) {
  return {.id = id, .salt = 0, .tokens = prompt(length, family), .soft = soft, .ttl_s = ttl_s};
}

int cached(Scene& scene, uint64_t id) { return scene.recorder->choice(id).cached_tokens; }

// Prompts that want the whole pool and more, one after another.
void flood(Scene& scene, uint64_t from, int n = 12) {
  for (int i = 0; i < n; ++i) {
    scene.ask(from + uint64_t(i), 140, 4, 20 + int(from) % 100 + i);
    scene.settle();
  }
}

TEST_CASE("pins: what is pinned is found after a flood, what is not is gone", "[disagg][pins]") {
  for (const char* how : {"not at all", "soft", "hard"}) {
    INFO(how);
    Scene scene("1C");
    scene.ask(1, 100, 4, 1);
    scene.settle();
    if (how != std::string("not at all"))
      REQUIRE(scene.conductor().pin_prefix(pin(7, 96, 1, how == std::string("soft"))).ok());
    scene.ticks(20);
    const bool hard = how == std::string("hard");
    CHECK(scene.stats("C0").kv.hard_pinned == (hard ? 6 : 0));
    CHECK(scene.stats("C0").kv.soft_pinned == (how == std::string("not at all") ? 0 : 6));
    flood(scene, 100);
    scene.ask(2, 100, 4, 1);
    scene.settle();
    CHECK(cached(scene, 2) == (how == std::string("not at all") ? 0 : 96));
    // Unpinned, it goes as anything else.
    CHECK(scene.conductor().unpin_prefix(7).ok() == (how != std::string("not at all")));
    CHECK(!scene.conductor().unpin_prefix(7).ok());
    scene.ticks(20);
    CHECK(scene.stats("C0").kv.hard_pinned == 0);
    CHECK(scene.stats("C0").kv.soft_pinned == 0);
    flood(scene, 200);
    scene.ask(3, 100, 4, 1);
    scene.settle();
    CHECK(cached(scene, 3) == 0);
  }
}

TEST_CASE("pins: what is computed after it was pinned stays, too, and what is longer is kept up to the pin",
          "[disagg][pins]") {
  Scene scene("1P1D");
  REQUIRE(scene.conductor().pin_prefix(pin(7, 64, 1)).ok());
  scene.ticks(20);
  CHECK(scene.stats("P0").kv.hard_pinned == 0);
  scene.ask(1, 100, 4, 1);
  scene.settle();
  scene.ticks(20);
  CHECK(scene.stats("P0").kv.hard_pinned == 4);
  CHECK(scene.stats("D1").kv.hard_pinned == 4);  // it has the KV, too
  flood(scene, 100);
  scene.ask(2, 100, 4, 1);
  scene.settle();
  CHECK(cached(scene, 2) == 64);
}

TEST_CASE("pins: a soft one gives way when nothing else can, a hard one never", "[disagg][pins]") {
  for (const bool soft : {true, false}) {
    INFO(soft);
    SimOptions options;
    options.kv.max_sequence_tokens = 320;
    Scene scene("1C", options);
    scene.ask(1, 300, 4, 1);
    scene.settle();
    REQUIRE(scene.conductor().pin_prefix(pin(7, 300, 1, soft)).ok());
    scene.ticks(20);
    // Two of 20 blocks: beside 18 that are pinned there is room for one at a time.
    scene.ask(2, 310, 4, 2);
    scene.ask(3, 310, 4, 3);
    scene.settle();
    scene.ask(4, 300, 4, 1);
    scene.settle();
    if (soft) CHECK(cached(scene, 4) < 288);
    if (!soft) CHECK(cached(scene, 4) == 288);
  }
}

TEST_CASE("pins: no more than half of the pool, and never so much that a request waits for ever", "[disagg][pins]") {
  Scene scene("1C");
  Conductor& conductor = scene.conductor();
  const Status short_one = conductor.pin_prefix(pin(1, 15, 1));
  REQUIRE(!short_one.ok());
  CHECK(short_one.error().code == ErrorCode::invalid_argument);
  CHECK(conductor.pin_prefix(pin(2, 159, 2)).ok());  // 9 blocks
  CHECK(conductor.pin_prefix(pin(3, 159, 3)).ok());
  const Status third = conductor.pin_prefix(pin(4, 48, 4));
  REQUIRE(!third.ok());
  CHECK(third.error().code == ErrorCode::unavailable);
  CHECK(third.error().message.find("21 KV blocks would be pinned, 20 of 40") != std::string::npos);
  CHECK(conductor.pin_prefix(pin(4, 32, 4)).ok());
  CHECK(conductor.pin_prefix(pin(5, 159, 5, true)).ok());  // soft ones give way
  CHECK(conductor.unpin_prefix(2).ok());
  CHECK(conductor.pin_prefix(pin(6, 48, 6)).ok());
  // A context of 38 of 40 blocks leaves two.
  SimOptions options;
  options.kv.max_sequence_tokens = 608;
  Scene long_context("1C", options);
  CHECK(!long_context.conductor().pin_prefix(pin(1, 48, 1)).ok());
  REQUIRE(long_context.conductor().pin_prefix(pin(1, 32, 1)).ok());
  long_context.ask(1, 40, 4, 1);
  long_context.settle();
  CHECK(long_context.stats("C0").kv.hard_pinned == 2);
  long_context.ask(2, 600, 8, 2);
  long_context.settle();  // it would not end otherwise
}

TEST_CASE("pins: they end with their time; an instance that joins later hears what is left of it", "[disagg][pins]") {
  Scene scene("1C");
  scene.ask(1, 100, 4, 1);
  scene.settle();
  REQUIRE(scene.conductor().pin_prefix(pin(7, 96, 1, false, 2)).ok());
  scene.ticks(500);
  scene.add(Role::colocated);
  scene.ticks(20);
  scene.crash(scene.find("C0")->id, true);
  scene.ticks(50);
  scene.ask(2, 100, 4, 1);
  scene.settle();
  CHECK(scene.stats("C1").kv.hard_pinned == 6);
  CHECK(scene.conductor().pin_prefix(pin(8, 159, 2)).ok());
  CHECK(!scene.conductor().pin_prefix(pin(9, 159, 3)).ok());
  scene.ticks(2000);
  CHECK(scene.stats("C1").kv.hard_pinned == 0);
  CHECK(scene.conductor().pin_prefix(pin(9, 159, 3)).ok());
  CHECK(!scene.conductor().unpin_prefix(7).ok());
}

TEST_CASE("pins: of two with one beginning, the end of one leaves the other whole", "[disagg][pins]") {
  for (const bool soft : {true, false}) {
    INFO(soft);
    Scene scene("1C");
    scene.ask(1, 140, 4, 1);
    scene.settle();
    REQUIRE(scene.conductor().pin_prefix(pin(7, 96, 1, soft)).ok());
    REQUIRE(scene.conductor().pin_prefix(pin(8, 56, 1, soft)).ok());  // three blocks and a half
    scene.ticks(20);
    REQUIRE(scene.conductor().unpin_prefix(7).ok());
    scene.ticks(20);
    CHECK(scene.stats("C0").kv.soft_pinned == 3);
    CHECK(scene.stats("C0").kv.hard_pinned == (soft ? 0 : 3));
    flood(scene, 100);
    scene.ask(2, 140, 4, 1);
    scene.settle();
    CHECK(cached(scene, 2) == 48);
  }
}

TEST_CASE("hints: a pause is worth its memory or not, in seconds", "[disagg][pins]") {
  using pool::pays;
  CHECK(pays({.reload_s = 1, .ttl_s = 5, .share = 0.19}));
  CHECK(!pays({.reload_s = 1, .ttl_s = 5, .share = 0.21}));
  CHECK(pays({.reload_s = 1, .queue_s = 1, .ttl_s = 5, .share = 0.39}));
  CHECK(!pays({.reload_s = 0, .ttl_s = 5, .share = 0.01}));
}

TEST_CASE("hints: what a pause keeps stays until then, where it pays, and a thought goes at once", "[disagg][pins]") {
  // 104 tokens are worth 18 ms (1 ms a step, .1 ms a token) and are 6 of 40 blocks: a pause of .1 s pays, one of 1 s
  // does not.
  for (const double ttl_s : {0.0, 0.1, 1.0}) {
    INFO(ttl_s);
    Scene scene("1C");
    scene.ask(1, 100, 4, 1);
    scene.settle();
    CHECK(scene.stats("C0").kv.cached == 6);
    scene.conductor().hint({.salt = 0, .tokens = prompt(100, 1), .kept = 100, .ttl_s = ttl_s});
    scene.ticks(10);
    CHECK(scene.stats("C0").kv.soft_pinned == (ttl_s == 0.1 ? 6 : 0));
    scene.ticks(110);
    CHECK(scene.stats("C0").kv.soft_pinned == 0);
    CHECK(scene.stats("C0").kv.cached == 6);
  }
  Scene scene("1C");
  scene.ask(1, 100, 4, 1);
  scene.settle();
  // The thought begins in the third block: two can be asked for again.
  scene.conductor().hint({.salt = 0, .tokens = prompt(100, 1), .kept = 40});
  scene.ticks(10);
  CHECK(scene.stats("C0").kv.cached == 2);
  scene.ask(2, 100, 4, 1);
  scene.settle();
  CHECK(cached(scene, 2) == 32);
  // While somebody uses what is named it stays where it is, and is found no more.
  scene.ask(3, 100, 40, 1);
  scene.ticks(20);
  CHECK(scene.stats("C0").kv.active > 6);
  scene.conductor().hint({.salt = 0, .tokens = prompt(100, 1), .kept = 40});
  scene.settle();
  scene.ask(4, 100, 4, 1);
  scene.settle();
  CHECK(cached(scene, 4) == 32);
}

}  // namespace
}  // namespace xpyd::testing::pins_test
