// Tests radix prefix caching: hits to the token, eviction order, and copies of partly equal blocks.
#include <algorithm>

#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::radix_tree_test {

using Tokens = std::vector<int32_t>;

KvOptions radix_options(int block_tokens, int n_blocks) {
  KvOptions o = tiny_options(block_tokens, n_blocks);
  o.radix = true;
  return o;
}

TEST_CASE("radix: while nothing is evicted, a hit is all that any earlier sequence has in common",
          "[allocator][radix]") {
  struct Sequence {
    Tokens tokens;
    uint64_t salt;
    KvHandle handle;
  };
  for (int block_tokens : {1, 2, 4, 7}) {
    CAPTURE(block_tokens);
    Memory m(radix_options(block_tokens, 8000));
    Random random{uint64_t(block_tokens)};
    std::vector<Sequence> all;
    int within = 0;
    for (int i = 0; i < 400; ++i) {
      Sequence s{{}, random.below(2), kNoKv};
      int32_t letter = 0;
      for (size_t n = 1 + random.below(size_t(block_tokens) * 5 + 3); n > 0; --n)
        s.tokens.push_back(random.below(12) == 0 ? letter = int32_t(random.below(3)) : letter);
      ptrdiff_t common = 0;
      for (const Sequence& other : all)
        if (other.salt == s.salt)
          common = std::max(common, std::ranges::mismatch(s.tokens, other.tokens).in1 - s.tokens.begin());
      const KvReservation r = fill(*m.kv, s.tokens, s.salt);
      REQUIRE(r.cached_tokens == std::min(int(common), int(s.tokens.size()) - 1));
      within += r.cached_tokens % block_tokens != 0;
      s.handle = r.handle;
      for (uint64_t n = 1 + random.below(4); n > 0; --n) s.tokens.push_back(int32_t(random.below(3)));  // decode
      extend(*m.kv, s.handle, s.tokens, s.salt);
      REQUIRE(wrong_rows(*m.kv, s.handle, s.tokens, s.salt) == 0);
      all.push_back(s);
      if (random.below(3) > 0) m.kv->free(s.handle);  // the others go on running
      m.kv->check_invariants();
    }
    CHECK((within > 50) == (block_tokens > 1));
    CHECK(m.kv->stats().evictions == 0);
  }
}

TEST_CASE("radix: a sequence's last block stays when it ends, and the first to continue from it needs no copy",
          "[allocator][radix]") {
  Memory m(radix_options(8, 20));
  const Tokens turn = counting(21);
  m.kv->free(fill(*m.kv, turn, 0).handle);
  CHECK(m.kv->stats().cached == 3);
  const Tokens next = joined(turn, counting(9, 700)), other = joined(turn, counting(9, 800));
  const KvReservation r = m.kv->reserve(next, 0).value(), s = m.kv->reserve(other, 0).value();
  CHECK((r.cached_tokens == 21 && s.cached_tokens == 21));
  CHECK(m.kv->stats().cow_copies == 1);  // for the second one
  CHECK(m.kv->blocks(r.handle).back() != m.kv->blocks(s.handle).back());
  m.kv->free(s.handle);  // the copy has no token of its own, so it becomes free
  CHECK((m.kv->stats().cached == 0 && m.kv->probe(next, 0) == 21));
  extend(*m.kv, r.handle, next, 0);
  m.kv->check_invariants();
  CHECK(wrong_rows(*m.kv, r.handle, next, 0) == 0);
}

TEST_CASE("radix: a block under a lease, which a peer may still write, is not continued in place",
          "[allocator][radix]") {
  Memory m(radix_options(8, 20));
  KvMemory& kv = *m.kv;
  const Tokens turn = counting(21), late = joined(turn, counting(9, 700)), next = joined(turn, counting(9, 800));
  kv.free(fill(kv, turn, 0).handle);

  // A handover is abandoned while its peer's transfers are under way, so the lease stays.
  const KvReservation given_up = kv.reserve(late, 0).value();
  CHECK(given_up.cached_tokens == 21);
  REQUIRE(kv.append(given_up.handle, 9));
  const KvLease lease = kv.pin(given_up.handle);
  KvView place = kv.view(given_up.handle);
  const std::vector<int32_t> table(kv.blocks(given_up.handle).begin(), kv.blocks(given_up.handle).end());
  place.block_table = table.data();
  kv.free(given_up.handle);

  const KvReservation owner = fill(kv, next, 0);
  CHECK(owner.cached_tokens == 21);
  write_rows(place, late, 0, 21);
  CHECK(wrong_rows(kv, owner.handle, next, 0) == 0);
  kv.unpin(lease);
  kv.free(owner.handle);
}

TEST_CASE("radix: leaves are evicted by least recent use from their ends, and never while in use",
          "[allocator][radix]") {
  Memory m(radix_options(4, 12));
  const Tokens head = counting(6), a = joined(head, counting(6, 100)), b = joined(head, counting(6, 200)),
               c = counting(8, 300);
  m.kv->free(fill(*m.kv, a, 0).handle);               // 3 blocks
  const KvHandle running = fill(*m.kv, c, 0).handle;  // 2 blocks
  m.kv->free(fill(*m.kv, b, 0).handle);               // 2 of its own: the first has 2 rows of head, copied
  CHECK((m.kv->stats().cached == 5 && m.kv->stats().free == 5));
  const auto found = [&](const Tokens& t) { return m.kv->probe(joined(t, Tokens{9}), 0); };
  std::vector<KvHandle> wants;
  const auto want = [&](int blocks) {
    const Tokens other = counting(4 * blocks, 1000 * int32_t(1 + wants.size()));
    const KvHandle h = m.kv->reserve(other, 5).value().handle;
    REQUIRE(m.kv->append(h, 4 * blocks));
    wants.push_back(h);
    m.kv->check_invariants();
  };
  want(5);
  CHECK((found(a) == 12 && found(b) == 12 && found(c) == 8));
  want(1);  // a's end goes: it is older than b
  CHECK((found(a) == 8 && found(b) == 12 && found(c) == 8));
  want(1);  // and a's middle: b's block also has its rows of head
  CHECK((found(a) == 6 && found(b) == 12 && found(c) == 8));
  // This uses b's first two blocks.
  m.kv->free(m.kv->reserve(joined(Tokens(b.begin(), b.begin() + 7), Tokens{9}), 0).value().handle);
  want(1);
  CHECK((found(a) == 6 && found(b) == 8 && found(c) == 8));
  want(1);  // rows 4 and 5 of head go with the last block that has them
  CHECK((found(a) == 4 && found(b) == 4 && found(c) == 8));
  want(1);
  CHECK((found(a) == 0 && found(c) == 8 && m.kv->stats().evictions == 5));
  const KvHandle more = m.kv->reserve(counting(4, 9000), 5).value().handle;
  CHECK_FALSE(m.kv->append(more, 4));  // c runs: its blocks and its place in the tree stay
  CHECK(found(c) == 8);
  m.kv->free(running);
  CHECK(m.kv->append(more, 4));
  CHECK(found(c) == 4);
  m.kv->check_invariants();
}

}  // namespace xpyd::testing::radix_tree_test
