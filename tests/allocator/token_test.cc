// token: paging with a block of one token. No block is ever partly used, and a hit ends where the prompts differ.
#include <algorithm>

#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::token_test {
namespace {

TEST_CASE("token: what sequences hold is what they have written, to the token", "[allocator]") {
  Memory m(tiny_options(16, 64), "token");  // --block-tokens says nothing here
  CHECK(std::string(m.kv->name()) == "token");
  CHECK(m.pool->layout().block_tokens == 1);
  CHECK(m.pool->layout().n_blocks == 64 * 16);
  Random random(3);
  struct Held {
    KvHandle kv;
    std::vector<int32_t> tokens;
  };
  std::vector<Held> held;
  for (int round = 0; round < 2000; ++round) {
    if (held.size() == 12 || (!held.empty() && random.below(3) == 0)) {
      const size_t i = size_t(random.below(held.size()));
      m.kv->free(held[i].kv);
      held.erase(held.begin() + ptrdiff_t(i));
    } else if (!held.empty() && random.below(2)) {
      Held& h = held[size_t(random.below(held.size()))];
      h.tokens.push_back(int32_t(1000 + round));
      REQUIRE(m.kv->append(h.kv, 1));
      m.kv->written(h.kv, std::span(h.tokens).last(1));
    } else {
      std::vector<int32_t> prompt(size_t(1 + random.below(40)));
      for (int32_t& t : prompt) t = int32_t(1000000 + 100 * round + int(&t - prompt.data()));
      held.push_back({fill(*m.kv, prompt, 0).handle, prompt});
    }
    int64_t written = 0;
    for (const Held& h : held) {
      written += int64_t(h.tokens.size());
      REQUIRE(m.kv->blocks(h.kv).size() == h.tokens.size());
    }
    REQUIRE(m.kv->stats().active == written);  // nothing is shared here, and nothing wasted
  }
  m.kv->check_invariants();
}

TEST_CASE("token: a hit is exact to the token", "[allocator]") {
  Random random(4);
  for (int round = 0; round < 200; ++round) {
    Memory m(tiny_options(16, 64), "token");
    std::vector<int32_t> first(size_t(1 + random.below(60)));
    for (int32_t& t : first) t = int32_t(random.below(1000));
    KvReservation a = fill(*m.kv, first, 7);
    std::vector<int32_t> second(first.begin(), first.begin() + ptrdiff_t(random.below(first.size() + 1)));
    const size_t common = second.size();
    for (uint64_t more = 1 + random.below(20); more > 0; --more) second.push_back(5000);
    REQUIRE(m.kv->probe(second, 7) == int(common));
    REQUIRE(m.kv->probe(second, 8) == 0);
    REQUIRE(m.kv->probe(first, 7) == int(first.size()) - 1);  // its logits are wanted
    KvReservation b = fill(*m.kv, second, 7);
    REQUIRE(b.cached_tokens == int(common));
    REQUIRE(wrong_rows(m.kv->view(b.handle), second, 7) == 0);
    REQUIRE(m.kv->stats().active == int(first.size() + second.size() - common));
    m.kv->free(a.handle);
    m.kv->free(b.handle);
    m.kv->check_invariants();
  }
}

}  // namespace
}  // namespace xpyd::testing::token_test
