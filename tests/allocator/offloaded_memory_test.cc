// Tests offload tiers below a pool, over every scheme: what comes back is what went out, or it does not come back.
#include "allocator/offload/offloaded_memory.h"

#include <atomic>
#include <cerrno>
#include <functional>
#include <string>
#include <thread>

#include "allocator/eviction.h"
#include "base/clock.h"
#include "base/device/device.h"
#include "base/table.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"
#include "tests/late_copies.h"

namespace xpyd::testing::tiered_test {

constexpr int kBlock = 4;  // tokens of a tier's block
constexpr size_t kBlockBytes = kBlock * kTinyShape.token_bytes();
const char* const kSchemes[] = {"paged", "contiguous", "vattention"};

struct Setup {
  std::string scheme = "paged";
  KvOrder order = KvOrder::layer_major;
  int pool_tokens = 64, max_tokens = 32;
  int host_blocks = 16, disk_blocks = 0;
  std::string eviction = "lru";
  OffloadTiers::Seams seams;
  Device* device = &cpu_device();  // makes the copies
  std::function<void(const StoredBlocks&)> stores = {};
};

KvOptions kv_options(const Setup& s) {
  KvOptions o = tiny_options(4, s.pool_tokens / 4, false, s.order, s.max_tokens);
  o.vattention.max_sequences = 12;
  o.vattention.page_group_bytes = 4096;
  if (s.scheme == "vattention") {  // a row of 4096-byte groups is 64 or 256 tokens of this shape
    o.max_sequence_tokens = 4 * s.max_tokens;
    o.pool_bytes = 24 * 4096;
  }
  return o;
}

class Tiered {
 public:
  explicit Tiered(const Setup& s) : options(kv_options(s)) {
    options.tiers.host_bytes = size_t(s.host_blocks) * kBlockBytes;
    options.tiers.block_tokens = kBlock;
    options.tiers.eviction = s.eviction;
    options.tiers.stores = s.stores;
    if (s.disk_blocks > 0) {
      options.tiers.disk_dir = dir.path;
      options.tiers.disk_bytes = size_t(s.disk_blocks) * kBlockBytes;
    }
    pool = make_block_pool(s.scheme, options).value();
    auto tiers = OffloadTiers::create(options.shape, options.tiers, *s.device, s.seams);
    if (!tiers) FAIL(tiers.error().message);
    kv = std::make_unique<OffloadedMemory>(find_kv_scheme(s.scheme)->make(pool, options), std::move(tiers).value(),
                                           *s.device, clock);
  }
  // Runs a sequence as an engine does: waits for what is loading and computes the rest. Returns the tokens that were
  // not computed.
  int run(std::span<const int32_t> tokens, uint64_t salt = 0) {
    const KvReservation r = kv->reserve(tokens, salt).value();
    while (!kv->ready(r.handle)) std::this_thread::yield();
    const int cached = kv->written_tokens(r.handle);
    REQUIRE(cached <= r.cached_tokens);
    REQUIRE(cached < int(tokens.size()));
    REQUIRE(wrong_rows(*kv, r.handle, tokens.first(size_t(cached)), salt) == 0);
    extend(*kv, r.handle, tokens, salt);
    kv->free(r.handle);
    return cached;
  }
  // Runs a prompt of each of these families, of five blocks and two tokens.
  int run_families(int first, int last) {
    int cached = 0;
    for (int family = first; family < last; ++family) {
      cached += run(counting(22, family * 1000));
      kv->drain();
      kv->check_invariants(true);
    }
    return cached;
  }
  OffloadStats stats() const { return kv->stats().tiers; }

  TempDir dir;
  KvOptions options;
  RealClock clock;
  std::shared_ptr<KvPool> pool;
  std::unique_ptr<OffloadedMemory> kv;
};

std::vector<int32_t> tokens_of(int family, int n) { return counting(n, family * 1000); }

TEST_CASE("copy thread: copies run in order and at the given speed", "[tiers]") {
  for (double gbps : {0.0, 2.0}) {
    const auto owned = cpu_device().make_copy_queue(gbps);
    DeviceQueue& queue = *owned;
    std::vector<std::byte> from(3 << 20), middle(from.size()), to(from.size());
    for (size_t i = 0; i < from.size(); ++i) from[i] = std::byte(i * 7);
    RealClock clock;
    const double start = clock.now();
    queue.copy(std::vector<Copy>{{from.data(), middle.data(), from.size()}}, false);
    queue.copy(std::vector<Copy>{{middle.data(), to.data(), to.size()}}, true);
    queue.wait();
    CHECK(to == from);
    if (gbps > 0) CHECK(clock.now() - start >= 2.0 * double(from.size()) / (gbps * 1e9));
  }
}

TEST_CASE("tiers: a prompt's KV comes back after the pool has forgotten it", "[tiers]") {
  for (const char* scheme : kSchemes)
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (int disk : {0, 64}) {
        INFO(scheme << " order " << int(order) << " disk " << disk);
        Tiered t({.scheme = scheme, .order = order, .host_blocks = disk ? 20 : 40, .disk_blocks = disk});
        const int n = 22;  // five blocks and two tokens
        for (int round = 0; round < 2; ++round)
          for (int family = 0; family < 6; ++family) {
            const auto tokens = tokens_of(family, n);
            CHECK(t.kv->probe(tokens, 0) == 0);
            const int promised = t.kv->matched_tokens(tokens, 0);
            CHECK(promised == (round == 0 ? 0 : 20));
            CHECK(t.run(tokens) == promised);
            t.kv->drain();
            t.kv->check_invariants(true);
          }
        const OffloadStats s = t.stats();
        CHECK(s.host_hit_tokens + s.disk_hit_tokens == 6 * 20);
        CHECK(s.bytes_out == int64_t(30 * kBlockBytes));  // each block once
        CHECK(s.bytes_in == int64_t(30 * kBlockBytes));
        CHECK(s.dropped_out == 0);
        if (disk) CHECK(s.disk_hit_tokens >= 40);
        if (!disk) CHECK(s.host_hit_tokens == 120);
        // The last token is never matched, because its logits are wanted. Only tokens of this salt match.
        CHECK(t.kv->matched_tokens(tokens_of(0, 20), 0) == 16);
        CHECK(t.kv->matched_tokens(tokens_of(0, 21), 0) == 20);
        CHECK(t.kv->matched_tokens(tokens_of(0, 22), 7) == 0);
        t.kv->clear_prefix_cache();
        CHECK(t.stats().host_blocks + t.stats().disk_blocks == 0);
        CHECK(t.kv->matched_tokens(tokens_of(0, 22), 0) == 0);
        t.kv->check_invariants(true);
      }
}

TEST_CASE("tiers: a sequence longer than the host tier leaves its beginning there", "[tiers]") {
  for (const EvictionPolicy& policy : kEvictionPolicies) {
    INFO(policy.name);
    Tiered t({.pool_tokens = 256, .max_tokens = 128, .host_blocks = 8, .eviction = policy.name});
    const auto tokens = tokens_of(1, 100);
    CHECK(t.run(tokens) == 0);
    t.kv->drain();
    CHECK(t.kv->matched_tokens(tokens, 0) == 8 * kBlock);
    CHECK(t.stats().dropped_out == 25 - 8);
    CHECK(t.run(tokens) == 8 * kBlock);
    t.kv->check_invariants(true);
  }
}

TEST_CASE("tiers: a block is moved once, however many sequences want it", "[tiers]") {
  for (const char* scheme : kSchemes) {
    INFO(scheme);
    LateCopies device;
    std::atomic<int> reads{0};
    Setup setup{.scheme = scheme, .pool_tokens = 256, .host_blocks = 20, .disk_blocks = 64, .device = &device};
    setup.seams.disk_fault = [&](bool write, std::span<std::byte>, int result) {
      reads += !write;
      return result;
    };
    Tiered t(setup);
    // Two sequences compute the same at once, and it is offloaded once.
    device.late = true;
    const auto tokens = tokens_of(1, 22);
    KvHandle handles[3];
    for (int i = 0; i < 2; ++i) handles[i] = t.kv->reserve(tokens, 0).value().handle;
    for (int i = 0; i < 2; ++i) extend(*t.kv, handles[i], tokens, 0);
    CHECK(t.stats().bytes_out == int64_t(5 * kBlockBytes));
    // A third sequence asks for blocks that are still on their way out.
    const KvReservation third = t.kv->reserve(tokens, 0).value();
    CHECK(third.cached_tokens == 20);
    CHECK_FALSE(t.kv->ready(third.handle));
    device.late = false;
    const auto loads = [&](KvHandle handle) {
      while (!t.kv->ready(handle)) std::this_thread::yield();
      CHECK(t.kv->written_tokens(handle) == 20);
      CHECK(wrong_rows(*t.kv, handle, std::span(tokens).first(20), 0) == 0);
      t.kv->free(handle);
    };
    loads(third.handle);
    for (int i = 0; i < 2; ++i) t.kv->free(handles[i]);
    // The blocks are evicted to the disk. Three sequences want them back at once, and they are read once.
    t.run_families(2, 8);
    const int64_t hit = t.stats().disk_hit_tokens, before = reads;
    for (KvHandle& handle : handles) {
      const KvReservation r = t.kv->reserve(tokens, 0).value();
      CHECK(r.loading);
      handle = r.handle;
    }
    for (KvHandle handle : handles) loads(handle);
    CHECK(reads - before > 0);
    CHECK(reads - before <= 5);
    CHECK((t.stats().disk_hit_tokens - hit) == (reads - before) * kBlock);
    t.kv->drain();
    t.kv->check_invariants(true);
    // Destroying the memory waits for the copies.
    device.late = true;
    CHECK(t.kv->reserve(tokens, 0).value().loading);
    t.kv.reset();
  }
}

TEST_CASE("tiers: a failing disk is given up, and costs computation and no tokens", "[tiers]") {
  struct Case {
    const char* what;
    std::function<int(bool, std::span<std::byte>, int)> fault;
  };
  const Case cases[] = {
      {"full", [](bool write, std::span<std::byte>, int r) { return write ? -ENOSPC : r; }},
      {"gone", [](bool write, std::span<std::byte>, int r) { return write ? r : -EIO; }},
      {"short", [](bool write, std::span<std::byte>, int r) { return write ? r : r / 2; }},
      {"changed",
       [](bool write, std::span<std::byte> data, int r) {
         if (!write) data[7] ^= std::byte{0x10};
         return r;
       }},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    Setup setup{.host_blocks = 20, .disk_blocks = 64};
    setup.seams.disk_fault = c.fault;
    Tiered t(setup);
    int cached = 0;
    for (int round = 0; round < 4; ++round) cached += t.run_families(0, 6);
    const OffloadStats s = t.stats();
    const std::string what = c.what;
    CHECK((s.failed_writes > 0) == (what == "full"));
    CHECK((s.failed_reads > 0) == (what != "full"));
    CHECK(s.disk_blocks == 0);
    CHECK(s.disk_hit_tokens == 0);
    CHECK(cached == s.host_hit_tokens);
    t.kv->check_invariants(true);
  }
}

TEST_CASE("tiers: another thread may clear the cache while blocks are found, loaded and stored", "[tiers][stress]") {
  for (const char* scheme : kSchemes)
    for (int disk : {0, 64}) {
      INFO(scheme << " disk " << disk);
      LateCopies device;  // copies run at once, so nearly every round finds something
      Setup setup{.scheme = scheme,
                  .pool_tokens = 256,
                  .max_tokens = 128,
                  .host_blocks = disk ? 40 : 128,
                  .disk_blocks = disk,
                  .device = &device};
      Tiered t(setup);
      std::atomic<bool> done{false};
      std::atomic<int> forgotten{0}, rounds{0};
      std::thread other([&] {  // clears within a round at any point, but leaves rounds between that find something
        for (int next = 0; !done; next = rounds + forgotten % 16) {
          while (rounds < next && !done) std::this_thread::yield();
          t.kv->clear_prefix_cache();
          ++forgotten;
        }
      });
      int cached = 0;
      for (; rounds < 1000 || forgotten < 30; ++rounds) {
        cached += t.run(tokens_of(rounds % 3, 100));  // run() checks the bytes that come back
        if (rounds % 16 == 0) t.kv->check_invariants(false);
      }
      done = true;
      other.join();
      if (disk == 0) CHECK(cached > 1000);  // with a busy disk, blocks may find no slot
      t.kv->clear_prefix_cache();
      t.kv->drain();  // blocks that were being written could not go
      t.kv->clear_prefix_cache();
      CHECK(t.stats().host_blocks + t.stats().disk_blocks == 0);
      t.kv->check_invariants(true);
    }
}

TEST_CASE("tiers: copies out run while the next step computes, and their ends are found after it", "[tiers]") {
  LateCopies device;
  std::vector<StoredBlocks> found;
  Tiered t({.device = &device, .stores = [&](const StoredBlocks& s) { found.push_back(s); }});
  const auto tokens = tokens_of(1, 32);
  const KvHandle handle = t.kv->reserve(tokens, 0).value().handle;
  device.late = true;
  const double begun_s = t.clock.now();
  for (int n : {8, 12, 14}) extend(*t.kv, handle, std::span(tokens).first(size_t(n)), 0);  // three steps
  CHECK(found.empty());
  CHECK(t.stats().store_seconds == 0);
  device.late = false;
  t.kv->poll();
  extend(*t.kv, handle, tokens, 0);
  t.kv->drain();
  REQUIRE(found.size() == 2);
  CHECK((found[0].blocks == 3 && found[1].blocks == 5));
  CHECK(found[0].bytes + found[1].bytes == t.stats().bytes_out);
  CHECK((found[0].begin_s >= begun_s && found[0].end_s <= found[1].begin_s));  // no second counts twice
  const double seconds = found[0].end_s - found[0].begin_s + found[1].end_s - found[1].begin_s;
  CHECK((seconds > 0 && t.stats().store_seconds == Approx(seconds)));
  t.kv->free(handle);
}

TEST_CASE("tiers: a sequence that ends while one of its blocks is copied out frees the others", "[tiers]") {
  for (const char* scheme : {"paged", "contiguous"}) {
    CAPTURE(scheme);
    LateCopies device;
    Tiered t({.scheme = scheme, .device = &device});
    const auto tokens = tokens_of(1, 32);
    const KvHandle handle = t.kv->reserve(tokens, 0).value().handle;
    const int before = 32 - kBlock;
    extend(*t.kv, handle, std::span(tokens).first(size_t(before)), 0);
    t.kv->drain();
    device.late = true;
    extend(*t.kv, handle, tokens, 0);
    t.kv->free(handle);
    const KvStats s = t.kv->stats();
    CHECK(s.in_transfer == 1);
    CHECK(s.available() == s.capacity - 1);
    device.late = false;
    t.kv->drain();
    CHECK(t.kv->stats().available() == s.capacity);
    CHECK(t.run(tokens) == before);  // never the last token: seven blocks
    t.kv->check_invariants(true);
  }
}

TEST_CASE("eviction: each policy evicts in its own order", "[tiers][eviction]") {
  const BlockUse old_deep{.last_use = 1, .uses = 9, .position = 7, .entered = 1},
      new_shallow{.last_use = 5, .uses = 1, .position = 0, .entered = 0};
  for (auto [name, old_goes] : {std::pair{"lru", true}, {"lfu", false}, {"length_aware", true}, {"fifo", false}}) {
    const EvictionPolicy& p = *find_row(kEvictionPolicies, name);
    CHECK((p.rank(old_deep) < p.rank(new_shallow)) == old_goes);
  }
  // A tier with room for two families of five blocks gets 1 and 2, then uses 1 again, and then gets 3.
  for (auto [policy, goes, stays] : {std::tuple{"lru", 2, 1}, {"fifo", 1, 2}}) {
    INFO(policy);
    Tiered t({.host_blocks = 12, .eviction = policy});
    t.run_families(1, 3);
    CHECK(t.run_families(1, 2) == 20);
    t.run_families(3, 4);
    CHECK(t.kv->matched_tokens(tokens_of(goes, 22), 0) < 20);
    CHECK(t.kv->matched_tokens(tokens_of(stays, 22), 0) == 20);
  }
}

}  // namespace xpyd::testing::tiered_test
