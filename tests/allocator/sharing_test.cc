// Tests prefixes shared on contiguous memory: which slot, which page-group rows and which bytes. Also tests the slots
// scheme.
#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "allocator/prefix/slot_contents.h"
#include "allocator/schemes.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::sharing_test {

KvOptions options_of(KvShare share, int n_rows = 64, int max_sequences = 4) {
  return vattention_options(n_rows, max_sequences, 2048, share);
}

std::vector<int32_t> tokens_of(int n, int kind) { return counting(n, kind * 10'000); }

// The first `shared` tokens of `first`, then other tokens.
std::vector<int32_t> like(const std::vector<int32_t>& first, int shared, int more, int kind) {
  return joined({first.begin(), first.begin() + shared}, tokens_of(more, 100 + kind));
}

constexpr int kRow = 256, kPlanes = 4;

TEST_CASE("SlotContents: find() takes the longest prefix with the least loss and never the last token",
          "[allocator][sharing]") {
  SlotContents contents(4);
  const auto a = tokens_of(100, 1);
  auto find = [&](const std::vector<int32_t>& tokens, uint64_t salt = 0, bool take = false) {
    return contents.find(tokens, salt, take);
  };
  CHECK(find(a).slot == -1);
  contents.begin(0, std::span(a).first(60), 0);
  contents.add(0, std::span(a).subspan(60));
  CHECK((find(a).slot == 0 && find(a).tokens == 99));
  CHECK(find(like(a, 100, 5, 2)).tokens == 100);
  CHECK(find(like(a, 16, 5, 2)).tokens == 16);
  CHECK(find(like(a, 15, 5, 2)).slot == -1);  // too little
  CHECK(find(a, 7).slot == -1);
  CHECK(find({}).slot == -1);
  CHECK(find(a, 0, true).slot == -1);  // it is in use
  contents.begin(1, like(a, 80, 10, 3), 0);
  CHECK(find(like(a, 90, 5, 2)).slot == 0);
  CHECK(find(like(a, 80, 5, 2)).slot == 0);  // both are in use: the first
  contents.end(1);
  CHECK(find(like(a, 80, 5, 2)).slot == 1);  // loses ten tokens, and the other is in use
  contents.end(0);
  CHECK(find(like(a, 80, 5, 2)).slot == 1);  // loses 10 tokens instead of 20
  CHECK(find(like(a, 50, 5, 2), 0, true).tokens == 50);
  CHECK(find(like(a, 44, 5, 2), 0, true).slot == -1);  // 46 of 90 would be lost
  contents.truncate(0, 30);
  CHECK(contents.size(0) == 30);
  CHECK(find(like(a, 44, 5, 2)).tokens == 44);
  contents.clear_idle();
  CHECK(find(a).slot == -1);
}

TEST_CASE("alias: full rows are mapped twice and counted once, and the tail is copied",
          "[allocator][vattention][sharing]") {
  Memory m(options_of(KvShare::alias), "vattention");
  const auto a = tokens_of(3 * kRow + 100, 1);
  const KvHandle donor = fill(*m.kv, a, 5).handle;
  const KvStats before = m.kv->stats();
  const auto b = like(a, 2 * kRow + 50, 300, 2);
  CHECK(m.kv->probe(b, 6) == 0);
  CHECK(m.kv->probe(b, 5) == 2 * kRow + 50);
  KvReservation r = m.kv->reserve(b, 5).value();
  CHECK(r.cached_tokens == 2 * kRow + 50);
  CHECK(std::ranges::equal(m.kv->blocks(r.handle).first(2), m.kv->blocks(donor).first(2)));
  CHECK(m.kv->blocks(r.handle)[2] != m.kv->blocks(donor)[2]);
  KvStats after = m.kv->stats();
  CHECK(after.active - before.active == 1);
  CHECK(after.written_bytes - before.written_bytes == 50 * int64_t(kTinyShape.token_bytes()));
  CHECK(after.vattention.map_calls - before.vattention.map_calls ==
        2 * kPlanes);  // one call for the two rows and one for the tail
  CHECK((after.prefix_hit_tokens == 2 * kRow + 50 && after.prefix_query_tokens == int(a.size() + b.size())));
  extend(*m.kv, r.handle, b, 5);
  CHECK(wrong_rows(*m.kv, r.handle, b, 5) == 0);
  CHECK(wrong_rows(*m.kv, donor, a, 5) == 0);
  m.kv->check_invariants();
}

TEST_CASE("sharing: slots keep their contents while empty ones are left, then the oldest is reused",
          "[allocator][vattention][sharing]") {
  Memory m(options_of(KvShare::copy, 64, 4), "vattention");
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 5; ++i) prompts.push_back(tokens_of(200, i));
  auto held = [&](int i) { return m.kv->probe(prompts[size_t(i)], 0); };
  for (int i = 0; i < 4; ++i) m.kv->free(fill(*m.kv, prompts[size_t(i)], 0).handle);
  for (int i = 0; i < 4; ++i) CHECK(held(i) == 199);
  m.kv->free(fill(*m.kv, prompts[4], 0).handle);
  CHECK((held(0) == 0 && held(1) == 199 && held(4) == 199));
  m.kv->clear_prefix_cache();
  CHECK(held(4) == 0);
  m.kv->check_invariants();
}

TEST_CASE("sharing: rows are reclaimed from the end, and the head stays usable", "[allocator][vattention][sharing]") {
  Memory m(options_of(KvShare::takeover, 8), "vattention");
  const auto a = tokens_of(6 * kRow, 1);
  m.kv->free(fill(*m.kv, a, 0).handle);
  const auto other = tokens_of(4 * kRow, 2);
  m.kv->free(fill(*m.kv, other, 0).handle);  // two rows are free, and two come from a
  CHECK(m.kv->probe(a, 0) == 4 * kRow);
  const KvReservation r = m.kv->reserve(a, 0).value();
  CHECK(r.cached_tokens == 4 * kRow);
  CHECK(wrong_rows(*m.kv, r.handle, std::span(a).first(4 * kRow), 0) == 0);
  m.kv->check_invariants();
}

// ---- slots (TurboMind)

TEST_CASE("slots: the next turn of a conversation computes only the new tokens", "[allocator][sharing]") {
  Memory m(tiny_options(1, 3 * 200, true, KvOrder::layer_major, 200), "slots");
  CHECK(m.kv->stats().capacity == 3);
  const auto turn1 = tokens_of(60, 1), turn2 = like(turn1, 60, 40, 2), turn3 = like(turn2, 100, 40, 3);
  auto run = [&](const std::vector<int32_t>& tokens, uint64_t session) {
    const KvReservation r = fill(*m.kv, tokens, session);
    CHECK(wrong_rows(*m.kv, r.handle, tokens, session) == 0);
    m.kv->free(r.handle);
    m.kv->check_invariants();
    return r.cached_tokens;
  };
  CHECK(run(turn1, 1) == 0);
  CHECK(run(turn1, 2) == 0);  // another session with the same text
  CHECK((m.kv->stats().cached == 2 && m.kv->stats().free == 1));
  CHECK(run(turn2, 1) == 60);
  CHECK(m.kv->stats().cached == 2);  // in the same slot
  CHECK(run(tokens_of(50, 5), 3) == 0);
  CHECK(run(tokens_of(50, 6), 4) == 0);  // no slot is free: session 2, the longest idle, is dropped
  CHECK(m.kv->stats().evictions == 1);
  CHECK(m.kv->probe(turn2, 2) == 0);
  CHECK(run(turn3, 1) == 100);
  CHECK(run(turn2, 2) == 0);  // it is computed again
  CHECK(run(turn3, 2) == 100);
}

TEST_CASE("slots: memory is allocated in chunks when a sequence needs a slot, and stays", "[allocator][sharing]") {
  constexpr int kSlots = 5, kTokens = 1024;  // 16 KiB of each layer's K or V
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (int chunk : {0, 1, 2}) {
      CAPTURE(int(order), chunk);
      KvOptions o = tiny_options(1, kSlots * kTokens, true, order, kTokens);
      o.slot_chunk = chunk;
      Memory m(o, "slots");
      const int64_t slot_bytes = int64_t(o.pool_bytes) / kSlots;
      // Both the memory and the operating system report this.
      const auto check = [&](int slots) {
        std::vector<unsigned char> pages(o.pool_bytes / 4096);
        REQUIRE(::mincore(m.kv->base(), o.pool_bytes, pages.data()) == 0);
        CHECK(m.kv->stats().mapped_bytes == slots * slot_bytes);
        CHECK(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; }) ==
              slots * slot_bytes / 4096);
      };
      const auto in_chunks = [&](int slots) {
        return chunk == 0 ? kSlots : std::min(kSlots, (slots + chunk - 1) / chunk * chunk);
      };
      check(in_chunks(0));
      std::vector<KvHandle> all;
      for (int i = 0; i < kSlots; ++i) {
        all.push_back(fill(*m.kv, tokens_of(700, i), uint64_t(i)).handle);
        check(in_chunks(i + 1));
      }
      for (KvHandle handle : all) m.kv->free(handle);
      check(kSlots);
    }
}

TEST_CASE("KvStats: the bytes of the pool are split into reserved, internal and external waste",
          "[allocator][sharing]") {
  struct {
    const char* scheme;
    int64_t reserved, internal, external;  // tokens of waste beside one sequence of 70 tokens
  } rows[] = {{"contiguous", 130, 0, 50}, {"slots", 130, 0, 50}, {"paged", 0, 10, 10}, {"vattention", 0, 186, 0}};
  for (const auto& row : rows) {
    CAPTURE(row.scheme);
    KvOptions o = tiny_options(16, 0, true, KvOrder::layer_major, 200);
    o.block_tokens = 20;
    const int64_t token = int64_t(o.shape.token_bytes());
    o.pool_bytes = size_t(650 * token);
    o.vattention = {.page_group_bytes = 4096, .max_sequences = 3, .map_ahead = false};
    if (row.scheme == std::string("vattention")) o.pool_bytes = 4 * vattention_row_bytes(o);
    Memory m(o, row.scheme);
    auto expect = [&](int64_t written, int64_t reserved, int64_t internal) {
      const KvStats s = m.kv->stats();
      CHECK(s.capacity_bytes == int64_t(o.pool_bytes));
      CHECK(s.written_bytes == written * token);
      CHECK(s.reserved_bytes == reserved * token);
      CHECK(s.internal_bytes == internal * token);
      CHECK(s.external_bytes == row.external * token);
      CHECK(s.idle_bytes == s.capacity_bytes - (written + reserved + internal + row.external) * token);
      m.kv->check_invariants();
    };
    expect(0, 0, 0);
    const KvHandle a = fill(*m.kv, tokens_of(70, 1), 0).handle;
    expect(70, row.reserved, row.internal);
    const KvHandle b = fill(*m.kv, tokens_of(70, 2), 1).handle;
    expect(140, 2 * row.reserved, 2 * row.internal);
    const KvLease lease = m.kv->pin(a);
    m.kv->free(a);
    expect(140, 2 * row.reserved, 2 * row.internal);
    m.kv->unpin(lease);
    m.kv->free(b);
    expect(0, 0, 0);
  }
}

}  // namespace xpyd::testing::sharing_test
