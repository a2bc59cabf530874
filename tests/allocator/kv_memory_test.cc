#include "allocator/kv_memory.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "allocator/row_pool.h"
#include "base/device.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_memory_test {

namespace {

std::vector<int32_t> counting(int n, int32_t from = 100) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

bool sums(const KvStats& s) { return s.free + s.active + s.cached + s.in_transfer == s.capacity; }

}  // namespace

TEST_CASE("kv_schemes: every row makes a memory of its name", "[allocator]") {
  CHECK(kv_schemes().size() >= 2);
  for (const KvScheme& scheme : kv_schemes()) {
    KvOptions options = tiny_options(16, 8, true, KvOrder::layer_major, 64);
    options.vattention.max_sequences = 4;
    options.vattention.page_group_bytes = 4096;
    options.keep_idle = false;
    options.vattention.map_ahead = false;
    options.pool_bytes = std::max(options.pool_bytes, size_t(1) << 16);
    auto pool = make_block_pool(scheme.name, options).value();
    auto kv = scheme.make(pool, options);
    CHECK(std::string(kv->name()) == scheme.name);
    CHECK(pool->layout().block_tokens == scheme.block_tokens(options));
    CHECK(find_kv_scheme(scheme.name) == &scheme);
    // Two instances over one pool.
    auto other = scheme.make(pool, options);
    KvReservation r = fill(*kv, counting(5), 0);
    const int tokens = scheme.block_tokens(options);
    CHECK(other->stats().active == (5 + tokens - 1) / tokens);
    kv->free(r.handle);
  }
  CHECK(find_kv_scheme("no such scheme") == nullptr);
}

TEST_CASE("paged: a hit covers full blocks of equal prefix and never the last token", "[allocator]") {
  Memory m(tiny_options(4, 32));
  std::vector<int32_t> prompt = counting(12);
  KvReservation first = fill(*m.kv, prompt, 0);
  CHECK(first.cached_tokens == 0);
  // 12 tokens are three full blocks; their last token is wanted, so two are hit.
  CHECK(m.kv->probe(prompt, 0) == 8);
  CHECK(m.kv->probe(counting(13), 0) == 12);
  CHECK(m.kv->probe(counting(11), 0) == 8);
  CHECK(m.kv->probe(counting(8), 0) == 4);
  CHECK(m.kv->probe(counting(5), 0) == 4);
  CHECK(m.kv->probe(counting(4), 0) == 0);
  CHECK(m.kv->probe(counting(1), 0) == 0);
  CHECK(m.kv->probe({}, 0) == 0);
  std::vector<int32_t> other = prompt;
  other[5] = -1;
  CHECK(m.kv->probe(other, 0) == 4);

  KvReservation second = m.kv->reserve(prompt, 0).value();
  CHECK(second.cached_tokens == 8);
  CHECK(m.kv->written_tokens(second.handle) == 8);
  CHECK(std::ranges::equal(m.kv->blocks(second.handle), m.kv->blocks(first.handle).first(2)));
  CHECK(wrong_rows(m.kv->view(second.handle), std::span(prompt).first(8), 0) == 0);
  KvStats stats = m.kv->stats();
  CHECK((stats.prefix_query_tokens == 24 && stats.prefix_hit_tokens == 8));
  CHECK((stats.active == 3 && sums(stats)));
  m.kv->check_invariants();
}

TEST_CASE("paged: salts isolate", "[allocator]") {
  Memory m(tiny_options(4, 32));
  std::vector<int32_t> prompt = counting(13);
  fill(*m.kv, prompt, 7);
  CHECK(m.kv->probe(prompt, 0) == 0);
  CHECK(m.kv->probe(prompt, 8) == 0);
  CHECK(m.kv->probe(prompt, 7) == 12);
  CHECK(fill(*m.kv, prompt, 8).cached_tokens == 0);
  CHECK(fill(*m.kv, prompt, 8).cached_tokens == 12);
  m.kv->check_invariants();
}

TEST_CASE("paged: a thousand forced collisions never give foreign KV", "[allocator]") {
  KvOptions options = tiny_options(4, 4096);
  auto pool = std::make_shared<BlockPool>(
      KvPlaces({options.shape, options.order, 4, 4096}, cpu_device().allocate(options.pool_bytes).value()), true,
      std::make_unique<FreeList>(4096), INT_MAX, 0xff);
  auto kv = find_kv_scheme("paged")->make(pool, options);
  Random random(3);
  int hits = 0;
  for (int i = 0; i < 1000; ++i) {  // 256 keys for up to 4096 blocks: nearly every look-up collides
    std::vector<int32_t> prompt(5 + random.below(8));
    for (int32_t& t : prompt) t = int32_t(random.below(3));
    uint64_t salt = random.below(3);
    KvReservation r = fill(*kv, prompt, salt);
    hits += r.cached_tokens > 0;
    REQUIRE(wrong_rows(kv->view(r.handle), prompt, salt) == 0);
    kv->free(r.handle);
  }
  CHECK(hits > 100);
  kv->check_invariants();
}

TEST_CASE("paged: the least recently used tail is evicted first", "[allocator]") {
  Memory m(tiny_options(4, 8));
  std::vector<int32_t> a = counting(17, 0), b = counting(13, 1000);  // 4 + 1 and 3 + 1 blocks
  auto run = [&](const std::vector<int32_t>& tokens) {
    KvReservation r = fill(*m.kv, tokens, 0);
    m.kv->free(r.handle);
    return r.cached_tokens;
  };
  run(a);
  run(b);
  CHECK(m.kv->stats().cached == 7);
  CHECK(m.kv->stats().free == 1);  // partial blocks are not kept
  run(a);                          // touched: b is older now
  CHECK(m.kv->stats().evictions == 0);
  // One free block; two more come from b's tail, before its head and before a.
  KvReservation c = fill(*m.kv, counting(12, 5000), 0);
  CHECK(m.kv->stats().evictions == 2);
  CHECK(m.kv->probe(a, 0) == 16);
  CHECK(m.kv->probe(b, 0) == 4);
  // probe does not touch: b's head goes next although it was just looked up.
  CHECK(m.kv->append(c.handle, 1));
  CHECK(m.kv->probe(b, 0) == 0);
  CHECK(m.kv->probe(a, 0) == 16);
  CHECK(m.kv->append(c.handle, 16));  // and then a, from its tail
  CHECK(m.kv->probe(a, 0) == 4);
  m.kv->check_invariants();
}

TEST_CASE("paged: a hit block is pinned while used", "[allocator]") {
  Memory m(tiny_options(4, 4));
  std::vector<int32_t> prompt = counting(9);
  m.kv->free(fill(*m.kv, prompt, 0).handle);
  KvReservation r = m.kv->reserve(prompt, 0).value();
  CHECK(r.cached_tokens == 8);
  KvHandle other = m.kv->reserve(counting(16, 900), 0).value().handle;
  CHECK_FALSE(m.kv->append(other, 12));
  CHECK(m.kv->append(other, 8));
  CHECK(wrong_rows(m.kv->view(r.handle), std::span(prompt).first(8), 0) == 0);
  m.kv->clear_prefix_cache();  // not in use only
  CHECK(m.kv->probe(prompt, 0) == 8);
  m.kv->free(r.handle);
  CHECK(m.kv->stats().cached == 2);
  m.kv->clear_prefix_cache();
  CHECK(m.kv->probe(prompt, 0) == 0);
  CHECK(m.kv->stats().free == 2);
  m.kv->check_invariants();
}

TEST_CASE("fork: writers part, in both orders", "[allocator]") {
  for (const char* scheme : {"paged", "contiguous"})
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
      Memory m(tiny_options(4, 32, true, order, 16), scheme);
      bool paged = std::string(scheme) == "paged";
      std::vector<int32_t> tokens = counting(6);
      KvHandle parent = fill(*m.kv, tokens, 0).handle;
      KvHandle child = m.kv->fork(parent).value();
      CHECK(m.kv->written_tokens(child) == 6);
      CHECK(m.kv->tail_shared(parent) == paged);
      CHECK(m.kv->tail_shared(child) == paged);
      auto add = [&](KvHandle handle, int32_t token) {
        std::vector<int32_t> longer = tokens;
        longer.push_back(token);
        REQUIRE(m.kv->append(handle, 1));
        write_rows(m.kv->view(handle), longer, 0, 6);
        m.kv->written(handle, {&token, 1});
        return longer;
      };
      std::vector<int32_t> of_parent = add(parent, 1), of_child = add(child, 2);
      CHECK(m.kv->stats().cow_copies == (paged ? 1 : 0));  // the second writer is alone by then
      CHECK_FALSE(m.kv->tail_shared(child));
      CHECK(wrong_rows(m.kv->view(parent), of_parent, 0) == 0);
      CHECK(wrong_rows(m.kv->view(child), of_child, 0) == 0);
      if (paged) CHECK(m.kv->blocks(parent)[0] == m.kv->blocks(child)[0]);
      CHECK(m.kv->stats().active == (paged ? 3 : 2));
      m.kv->check_invariants();
      m.kv->free(parent);
      CHECK(wrong_rows(m.kv->view(child), of_child, 0) == 0);
      m.kv->check_invariants();
    }
}

TEST_CASE("paged: fork with a full last block, and with unused room", "[allocator]") {
  Memory m(tiny_options(4, 32));
  KvHandle parent = fill(*m.kv, counting(8), 0).handle;
  REQUIRE(m.kv->append(parent, 6));
  KvHandle child = m.kv->fork(parent).value();
  CHECK(m.kv->blocks(parent).size() == 2);  // trimmed
  CHECK_FALSE(m.kv->tail_shared(child));
  REQUIRE(m.kv->append(child, 1));
  CHECK(m.kv->stats().cow_copies == 0);
  m.kv->check_invariants();
}

TEST_CASE("paged: copy-on-write needs one block more, and fails without it", "[allocator]") {
  Memory m(tiny_options(4, 2, true));
  KvHandle parent = fill(*m.kv, counting(6), 0).handle;
  KvHandle child = m.kv->fork(parent).value();
  CHECK_FALSE(m.kv->append(child, 1));
  CHECK(m.kv->append(child, 0));  // nothing to write, nothing to copy
  m.kv->free(parent);
  CHECK(m.kv->append(child, 1));
  m.kv->check_invariants();
}

TEST_CASE("a pool in page groups is as good as one allocation", "[allocator]") {
  for (const char* scheme : {"paged", "contiguous"})
    for (size_t group : {size_t{4096}, size_t{2} << 20}) {
      KvOptions o = tiny_options(4, 80, true, KvOrder::layer_major, 16);  // no whole groups of bytes
      o.pool_in_groups = true;
      o.vattention.page_group_bytes = group;
      Memory m(o, scheme);
      if (group > 4096) CHECK(reinterpret_cast<uintptr_t>(m.pool->data()) % group == 0);
      std::vector<std::pair<KvHandle, int32_t>> live;
      for (int32_t i = 0; i < 20; ++i) live.push_back({fill(*m.kv, counting(13, i * 100), 0).handle, i * 100});
      for (const auto& [handle, from] : live) CHECK(wrong_rows(m.kv->view(handle), counting(13, from), 0) == 0);
      m.kv->check_invariants();
    }
}

TEST_CASE("pin: leased blocks outlive their sequence", "[allocator]") {
  for (const char* scheme : {"paged", "contiguous"}) {
    Memory m(tiny_options(4, 8, true, KvOrder::layer_major, 16), scheme);
    bool paged = std::string(scheme) == "paged";
    std::vector<int32_t> tokens = counting(6);
    KvHandle handle = fill(*m.kv, tokens, 0).handle;
    KvView view = m.kv->view(handle);
    std::vector<int32_t> table(m.kv->blocks(handle).begin(), m.kv->blocks(handle).end());
    KvLease lease = m.kv->pin(handle), second = m.kv->pin(handle);
    int held = paged ? 2 : 1;
    CHECK((m.kv->stats().in_transfer == held && m.kv->stats().active == 0));
    m.kv->free(handle);
    m.kv->unpin(second);
    CHECK((m.kv->stats().in_transfer == held && sums(m.kv->stats())));
    m.kv->check_invariants();
    if (paged) view.block_table = table.data();
    while (true) {  // fill whatever is left: the leased bytes stay
      Result<KvReservation> r = m.kv->reserve(counting(4, 700), 9);
      if (!r.ok() || !m.kv->append(r.value().handle, 4)) break;
      write_rows(m.kv->view(r.value().handle), counting(4, 700), 9, 0);
    }
    CHECK(wrong_rows(view, tokens, 0) == 0);
    m.kv->unpin(lease);
    CHECK((m.kv->stats().cached == (paged ? 1 : 0) && m.kv->stats().in_transfer == 0));
    m.kv->check_invariants();
  }
}

// A lease of tokens [8, 12) of 24, of which the others are wanted when the sequence has gone.
TEST_CASE("pin: of a range, blocks that hold none of it go with their sequence", "[allocator]") {
  struct {
    const char* scheme;
    int held;  // blocks when the sequence has gone
  } rows[] = {{"paged", 1}, {"token", 4}, {"contiguous", 1}, {"slots", 1}, {"vattention", 1}};
  for (const auto& row : rows) {
    CAPTURE(row.scheme);
    const std::string scheme = row.scheme;
    KvOptions o = tiny_options(scheme == "token" ? 1 : 4, 0, false, KvOrder::layer_major, 24);
    o.vattention.max_sequences = 2;
    o.vattention.map_ahead = o.keep_idle = false;
    o.pool_bytes = 2 * 24 * o.shape.token_bytes();
    if (scheme == "vattention") {  // rows of 256 tokens
      o.max_sequence_tokens = 24 * 64;
      o.vattention.page_group_bytes = 4096;
      o.pool_bytes = 8 * vattention_row_bytes(o);
    }
    const int scale = scheme == "vattention" ? 64 : 1;
    Memory m(o, row.scheme);
    const std::vector<int32_t> tokens = counting(24 * scale);
    const KvHandle handle = fill(*m.kv, tokens, 0).handle;
    KvView view = m.kv->view(handle);
    const std::vector<int32_t> table(m.kv->blocks(handle).begin(), m.kv->blocks(handle).end());
    if (view.block_table) view.block_table = table.data();
    const KvLease last = m.kv->pin(handle, 20 * scale, 24 * scale), lease = m.kv->pin(handle, 8, 12);
    m.kv->free(handle);
    m.kv->check_invariants();
    m.kv->unpin(last);
    m.kv->check_invariants();
    const KvStats s = m.kv->stats();
    CHECK(s.in_transfer == row.held);
    CHECK(s.active == 0);
    CHECK(s.free == s.capacity - row.held);
    const std::vector<int32_t> other = counting(24, 700);
    while (true) {  // whatever is left is written over
      const Result<KvReservation> r = m.kv->reserve(other, 9);
      if (!r.ok() || !m.kv->append(r.value().handle, 24)) break;
      write_rows(m.kv->view(r.value().handle), other, 9, 0);
      m.kv->written(r.value().handle, other);
    }
    int wrong = 0, t = 0;
    each_row(view, std::span(tokens).first(12), 0, 8,
             [&](std::byte* at, uint64_t pattern) { wrong += std::memcmp(at, &pattern, sizeof pattern) != 0, ++t; });
    CHECK((wrong == 0 && t > 0));
    m.kv->unpin(lease);
    CHECK(m.kv->stats().in_transfer == 0);
    m.kv->check_invariants();
  }
}

TEST_CASE("hand_over: blocks travel between two memories of one pool, no byte moves", "[allocator]") {
  for (const char* scheme : {"paged", "contiguous"}) {
    bool paged = std::string(scheme) == "paged";
    Memory p(tiny_options(4, 12, true, KvOrder::token_major, 16), scheme);
    auto d = find_kv_scheme(scheme)->make(p.pool, p.options);
    std::vector<int32_t> tokens = counting(10);
    KvHandle source = fill(*p.kv, tokens, 5).handle;
    std::byte* row = p.kv->view(source).row(1, 1, 9, 1);
    int n = int(p.kv->blocks(source).size());
    KvHandover handover = p.kv->handoff().hand_over(source);
    CHECK((handover.tokens == 10 && int(handover.blocks.size()) == n));
    CHECK((p.kv->stats().in_transfer == n && p.kv->stats().active == 0));
    p.kv->check_invariants(true);
    KvHandle target = d->handoff().adopt(handover, tokens, 5);
    CHECK((d->stats().in_transfer == 0 && d->stats().active == n));
    CHECK(d->view(target).row(1, 1, 9, 1) == row);
    CHECK(wrong_rows(d->view(target), tokens, 5) == 0);
    d->check_invariants(true);
    // D goes on where P stopped; what it fills becomes findable for both.
    std::vector<int32_t> longer = counting(13);
    REQUIRE(d->append(target, 3));
    write_rows(d->view(target), longer, 5, 10);
    d->written(target, std::span(longer).subspan(10));
    if (paged) CHECK(p.kv->probe(longer, 5) == 12);
    KvHandover lost = d->handoff().hand_over(target);
    d->handoff().discard(lost);
    CHECK((sums(d->stats()) && d->stats().in_transfer == 0 && d->stats().active == 0));
    CHECK(d->stats().cached == (paged ? 3 : 0));
    d->check_invariants(true);
  }
}

TEST_CASE("hand_over: a forked sibling keeps its tail", "[allocator]") {
  Memory p(tiny_options(4, 12));
  auto d = find_kv_scheme("paged")->make(p.pool, p.options);
  std::vector<int32_t> tokens = counting(6), mine = counting(7), theirs = counting(7);
  theirs[6] = 1;
  KvHandle a = fill(*p.kv, tokens, 0).handle;
  KvHandle b = p.kv->fork(a).value();
  KvHandover handover = p.kv->handoff().hand_over(b);
  CHECK(p.kv->tail_shared(a));  // with what is under way
  REQUIRE(p.kv->append(a, 1));
  write_rows(p.kv->view(a), mine, 0, 6);
  p.kv->written(a, {&mine[6], 1});
  KvHandle c = d->handoff().adopt(handover, tokens, 0);
  REQUIRE(d->append(c, 1));
  write_rows(d->view(c), theirs, 0, 6);
  d->written(c, {&theirs[6], 1});
  CHECK(wrong_rows(p.kv->view(a), mine, 0) == 0);
  CHECK(wrong_rows(d->view(c), theirs, 0) == 0);
  p.kv->check_invariants(false);
  d->check_invariants(false);
}

TEST_CASE("paged: what two sequences compute at once is indexed once", "[allocator]") {
  Memory m(tiny_options(4, 16));
  std::vector<int32_t> tokens = counting(9);
  KvHandle a = m.kv->reserve(tokens, 0).value().handle;
  KvHandle b = m.kv->reserve(tokens, 0).value().handle;
  for (KvHandle h : {a, b}) {
    REQUIRE(m.kv->append(h, 9));
    write_rows(m.kv->view(h), tokens, 0, 0);
    m.kv->written(h, tokens);
  }
  CHECK(m.kv->stats().active == 6);
  KvHandle c = m.kv->reserve(tokens, 0).value().handle;
  CHECK(std::ranges::equal(m.kv->blocks(c), m.kv->blocks(a).first(2)));
  m.kv->free(b);
  CHECK((m.kv->stats().cached == 0 && m.kv->stats().active == 3));
  m.kv->free(a);
  m.kv->free(c);
  CHECK(m.kv->stats().cached == 2);
  m.kv->check_invariants();
}

TEST_CASE("paged: a block whose indexed ancestor was evicted comes back by adoption", "[allocator]") {
  Memory m(tiny_options(4, 8));
  std::vector<int32_t> tokens = counting(8);
  KvHandle a = m.kv->reserve(tokens, 0).value().handle;
  KvHandle b = m.kv->reserve(tokens, 0).value().handle;
  auto write4 = [&](KvHandle h, int from) {
    REQUIRE(m.kv->append(h, 4));
    write_rows(m.kv->view(h), std::span(tokens).first(size_t(from) + 4), 0, from);
    m.kv->written(h, std::span(tokens).subspan(size_t(from), 4));
  };
  write4(a, 0);
  write4(b, 0);  // the same content: not indexed
  write4(b, 4);  // indexed after a's block
  m.kv->free(a);
  m.kv->clear_prefix_cache();
  CHECK(m.kv->probe(counting(9), 0) == 0);
  KvHandle c = m.kv->handoff().adopt(m.kv->handoff().hand_over(b), tokens, 0);
  CHECK(m.kv->probe(counting(9), 0) == 8);
  m.kv->check_invariants();
  m.kv->free(c);
  CHECK(m.kv->stats().cached == 2);
  m.kv->check_invariants();
}

TEST_CASE("contiguous: a slot at reserve, unavailable without one", "[allocator]") {
  Memory m(tiny_options(1, 40, true, KvOrder::layer_major, 20), "contiguous");
  CHECK(m.kv->stats().capacity == 2);
  KvHandle a = m.kv->reserve(counting(5), 0).value().handle;
  KvHandle b = m.kv->reserve(counting(5), 0).value().handle;
  Result<KvReservation> none = m.kv->reserve(counting(5), 0);
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::unavailable);
  CHECK(m.kv->fork(a).error().code == ErrorCode::unavailable);
  CHECK(m.kv->view(a).contiguous());
  CHECK(m.kv->view(a).slot != m.kv->view(b).slot);
  CHECK(m.kv->append(a, 20));
  m.kv->free(b);
  CHECK(m.kv->reserve(counting(5), 0).ok());
  CHECK(m.kv->probe(counting(5), 0) == 0);
  m.kv->check_invariants();
}

TEST_CASE("KvMemory: the view is stable between changes and the pool is exactly as asked", "[allocator]") {
  KvOptions options = tiny_options(4, 10);
  options.pool_bytes += 100;  // the tail stays unused
  Memory m(options);
  CHECK(m.pool->layout().n_blocks == 10);
  KvHandle a = m.kv->reserve(counting(5), 0).value().handle;
  REQUIRE(m.kv->append(a, 5));
  KvView view = m.kv->view(a);
  std::vector<KvHandle> others;
  for (int i = 0; i < 100; ++i) others.push_back(m.kv->reserve(counting(5), 0).value().handle);
  CHECK(m.kv->view(a).block_table == view.block_table);
  CHECK_FALSE(m.kv->view(others[3]).contiguous());  // an empty table is a table
}

TEST_CASE("KvMemory: what its owner forgets is given back to a shared pool", "[allocator]") {
  Memory m(tiny_options(4, 10));
  {
    auto other = find_kv_scheme("paged")->make(m.pool, m.options);
    other->pin(fill(*other, counting(5), 0).handle);
    CHECK(m.kv->stats().in_transfer == 2);
  }
  CHECK((m.kv->stats().in_transfer == 0 && m.kv->stats().cached == 1));
  m.kv->check_invariants();
}

}  // namespace xpyd::testing::kv_memory_test
