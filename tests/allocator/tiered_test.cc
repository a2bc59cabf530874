// Tiers below a pool, over every scheme: what comes back is what went out, or it does not come back.
#include "allocator/tiered.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "allocator/prefix_index.h"
#include "base/clock.h"
#include "base/device.h"
#include "base/random.h"
#include "base/table.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"
#include "tests/late_copies.h"

namespace xpyd::testing::tiered_test {
namespace {

constexpr int kBlock = 4;  // tokens of a tier's block
constexpr size_t kBlockBytes = kBlock * kTinyShape.token_bytes();
const char* const kSchemes[] = {"paged", "token", "contiguous", "vattention"};

struct Setup {
  std::string scheme = "paged";
  KvOrder order = KvOrder::layer_major;
  int pool_tokens = 64, max_tokens = 32;
  bool prefix_cache = false;  // of the pool itself
  int host_blocks = 16, disk_blocks = 0;
  double gbps = 0;
  std::string host_eviction = "lru", disk_eviction = "lru";
  KvShare share = KvShare::off;  // vattention
  KvTiers::Seams seams;
  Device* device = &cpu_device();  // of the copies
  Clock* clock = nullptr;          // null: the machine's
  std::shared_ptr<CacheListener> listener = {};
  bool radix = false;  // prefix_cache finds to the token
};

KvOptions kv_options(const Setup& s) {
  KvOptions o = tiny_options(4, s.pool_tokens / 4, s.prefix_cache, s.order, s.max_tokens);
  o.radix = s.radix;
  o.vattention.max_sequences = 12;
  o.vattention.page_group_bytes = 4096;
  if (s.scheme == "vattention") {  // a row of 4096-byte groups is 64 or 256 tokens of this shape
    o.max_sequence_tokens = 4 * s.max_tokens;
    o.pool_bytes = 24 * 4096;
    o.vattention.share = s.share;
    o.prefix_cache = s.share != KvShare::off;
  }
  return o;
}

class Tiered {
 public:
  explicit Tiered(const Setup& s) : options(kv_options(s)) {
    options.tiers.host_bytes = size_t(s.host_blocks) * kBlockBytes;
    options.tiers.block_tokens = kBlock;
    options.tiers.copy_gbps = s.gbps;
    options.tiers.host_eviction = s.host_eviction;
    options.tiers.disk_eviction = s.disk_eviction;
    if (s.listener) options.tiers.listeners.push_back(s.listener);
    if (s.disk_blocks > 0) {
      options.tiers.disk_dir = dir.path;
      options.tiers.disk_bytes = size_t(s.disk_blocks) * DiskFile::kSector;
    }
    pool = make_block_pool(s.scheme, options).value();
    auto tiers = KvTiers::create(options.shape, options.tiers, *s.device, s.seams);
    if (!tiers) FAIL(tiers.error().message);
    kv = std::make_unique<TieredMemory>(find_kv_scheme(s.scheme)->make(pool, options), std::move(tiers).value(),
                                        *s.device, s.clock ? *s.clock : clock);
  }
  // As an engine: waits for what is loading, computes the rest. Returns the tokens not computed.
  int run(std::span<const int32_t> tokens, uint64_t salt = 0) {
    const KvReservation r = kv->reserve(tokens, salt).value();
    while (!kv->ready(r.handle)) std::this_thread::yield();
    const int cached = kv->written_tokens(r.handle);
    REQUIRE(cached <= r.cached_tokens);
    REQUIRE(cached < int(tokens.size()));
    REQUIRE(wrong_rows(kv->view(r.handle), tokens.first(size_t(cached)), salt) == 0);
    REQUIRE(kv->append(r.handle, int(tokens.size()) - cached));
    write_rows(kv->view(r.handle), tokens, salt, cached);
    kv->written(r.handle, tokens.subspan(size_t(cached)));
    kv->free(r.handle);
    return cached;
  }
  KvTierStats stats() const { return kv->stats().tiers; }

  TempDir dir;
  KvOptions options;
  RealClock clock;
  std::shared_ptr<KvPool> pool;
  std::unique_ptr<TieredMemory> kv;
};

std::vector<int32_t> tokens_of(int family, int n) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) tokens[size_t(i)] = family * 1000 + i;
  return tokens;
}

TEST_CASE("copy thread: copies in order, at the speed that it is given", "[tiers]") {
  for (double gbps : {0.0, 2.0}) {
    const auto owned = cpu_device().make_copy_queue(gbps);
    DeviceQueue& queue = *owned;
    std::vector<std::byte> from(3 << 20), middle(from.size()), to(from.size());
    for (size_t i = 0; i < from.size(); ++i) from[i] = std::byte(i * 7);
    RealClock clock;
    const double start = clock.now();
    CHECK(queue.reached(queue.mark()));
    queue.copy(std::vector<Copy>{{from.data(), middle.data(), from.size()}}, false);
    queue.copy(std::vector<Copy>{{middle.data(), to.data(), to.size()}}, true);
    const int64_t mark = queue.mark();
    while (!queue.reached(mark)) std::this_thread::yield();
    CHECK(to == from);
    if (gbps > 0) CHECK(clock.now() - start >= 2.0 * double(from.size()) / (gbps * 1e9));
    queue.copy(std::vector<Copy>{{to.data(), middle.data(), to.size()}}, true);
    queue.wait();
    CHECK(queue.reached(queue.mark()));
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
            const int promised = t.kv->promise(tokens, 0);
            CHECK(promised == (round == 0 ? 0 : 20));
            CHECK(t.run(tokens) == promised);
            t.kv->drain();
            t.kv->check_invariants(true);
          }
        const KvTierStats s = t.stats();
        CHECK(s.host_hit_tokens + s.disk_hit_tokens == 6 * 20);
        CHECK(s.bytes_out == int64_t(30 * kBlockBytes));  // each block once
        CHECK(s.bytes_in == int64_t(30 * kBlockBytes));
        CHECK(s.dropped_out == 0);
        if (disk) CHECK(s.disk_hit_tokens >= 40);
        if (!disk) CHECK(s.host_hit_tokens == 120);
        // Never the last token, whose logits are wanted; and only this salt's.
        CHECK(t.kv->promise(tokens_of(0, 20), 0) == 16);
        CHECK(t.kv->promise(tokens_of(0, 21), 0) == 20);
        CHECK(t.kv->promise(tokens_of(0, 22), 7) == 0);
        t.kv->clear_prefix_cache();
        CHECK(t.stats().host_blocks + t.stats().disk_blocks == 0);
        CHECK(t.kv->promise(tokens_of(0, 22), 0) == 0);
        t.kv->check_invariants(true);
      }
}

TEST_CASE("tiers: eviction policies", "[tiers]") {
  const BlockUse old_deep{.last_use = 1, .uses = 9, .position = 7},
      new_shallow{.last_use = 5, .uses = 1, .position = 0};
  auto first = [&](const char* name) {
    const EvictionPolicy& p = *find_row(kEvictionPolicies, name);
    return p.rank(old_deep) < p.rank(new_shallow) ? 1 : 2;
  };
  CHECK(first("lru") == 1);
  CHECK(first("lfu") == 2);
  CHECK(first("length_aware") == 1);
  CHECK(find_row(kEvictionPolicies, "mru") == nullptr);
}

TEST_CASE("tiers: a sequence longer than the host leaves its beginning there", "[tiers]") {
  for (const EvictionPolicy& policy : kEvictionPolicies) {
    INFO(policy.name);
    Tiered t({.pool_tokens = 256, .max_tokens = 128, .host_blocks = 8, .host_eviction = policy.name});
    const auto tokens = tokens_of(1, 100);
    CHECK(t.run(tokens) == 0);
    t.kv->drain();
    CHECK(t.kv->promise(tokens, 0) == 8 * kBlock);
    CHECK(t.stats().dropped_out == 25 - 8);
    CHECK(t.run(tokens) == 8 * kBlock);
    t.kv->check_invariants(true);
  }
}

TEST_CASE("tiers: a block is moved once, however many want it", "[tiers]") {
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
    // Two compute the same at once: it goes out once.
    device.late = true;
    const auto tokens = tokens_of(1, 22);
    KvHandle handles[3];
    for (int i = 0; i < 2; ++i) {
      const KvReservation r = t.kv->reserve(tokens, 0).value();
      CHECK(!r.loading);
      handles[i] = r.handle;
      REQUIRE(t.kv->append(r.handle, 22));
    }
    for (int i = 0; i < 2; ++i) {
      write_rows(t.kv->view(handles[i]), tokens, 0, 0);
      t.kv->written(handles[i], tokens);
    }
    CHECK(t.stats().bytes_out == int64_t(5 * kBlockBytes));
    // A third asks for what is still on its way out.
    const KvReservation third = t.kv->reserve(tokens, 0).value();
    CHECK(third.cached_tokens == 20);
    for (int i = 0; i < 10; ++i) CHECK(!t.kv->ready(third.handle));
    device.late = false;
    while (!t.kv->ready(third.handle)) std::this_thread::yield();
    CHECK(t.kv->written_tokens(third.handle) == 20);
    CHECK(wrong_rows(t.kv->view(third.handle), std::span(tokens).first(20), 0) == 0);
    for (KvHandle handle : {handles[0], handles[1], third.handle}) t.kv->free(handle);
    // Push it to the disk; three want it back at once: it is read once.
    for (int family = 2; family < 8; ++family) {
      t.run(tokens_of(family, 22));
      t.kv->drain();
    }
    const int64_t hit = t.stats().disk_hit_tokens, before = reads;
    for (KvHandle& handle : handles) {
      const KvReservation r = t.kv->reserve(tokens, 0).value();
      CHECK(r.loading);
      handle = r.handle;
    }
    for (KvHandle handle : handles) {
      while (!t.kv->ready(handle)) std::this_thread::yield();
      CHECK(t.kv->written_tokens(handle) == 20);
      CHECK(wrong_rows(t.kv->view(handle), std::span(tokens).first(20), 0) == 0);
      t.kv->free(handle);
    }
    CHECK(reads - before > 0);
    CHECK(reads - before <= 5);
    CHECK((t.stats().disk_hit_tokens - hit) == (reads - before) * kBlock);
    t.kv->drain();
    t.kv->check_invariants(true);
  }
}

TEST_CASE("tiers: a sequence that is given up while its KV comes keeps its memory until then", "[tiers]") {
  for (const char* scheme : kSchemes) {
    INFO(scheme);
    LateCopies device;
    Tiered t({.scheme = scheme, .pool_tokens = 256, .host_blocks = 64, .device = &device});
    const auto tokens = tokens_of(1, 22), others = tokens_of(2, 22);
    t.run(tokens);
    t.kv->drain();
    const int idle = t.kv->stats().active;
    device.late = true;
    const KvReservation r = t.kv->reserve(tokens, 0).value();
    REQUIRE(r.loading);
    const int held = t.kv->stats().active + t.kv->stats().in_transfer - idle;
    CHECK(held > 0);
    // Others come, compute and go meanwhile.
    const KvReservation other = t.kv->reserve(others, 0).value();
    REQUIRE(t.kv->append(other.handle, 22));
    write_rows(t.kv->view(other.handle), others, 0, 0);
    t.kv->written(other.handle, others);
    CHECK(!t.kv->ready(r.handle));
    t.kv->free(r.handle);
    t.kv->check_invariants(true);
    for (int i = 0; i < 10; ++i) t.kv->poll();
    CHECK(wrong_rows(t.kv->view(other.handle), others, 0) == 0);
    t.kv->free(other.handle);
    CHECK(t.kv->stats().active + t.kv->stats().in_transfer - idle >= held);
    device.late = false;
    t.kv->drain();
    const KvStats s = t.kv->stats();
    CHECK(s.free + s.cached == s.capacity);
    CHECK(s.tiers.host_hit_tokens == 0);  // nobody went on from it
    CHECK(t.run(tokens) == 20);
    CHECK(t.stats().host_hit_tokens == 20);
    CHECK(t.run(others) == 20);
    // Nor does the end of the memory come before the copies' end.
    device.late = true;
    CHECK(t.kv->reserve(tokens, 0).value().loading);
    t.kv.reset();
  }
}

// Sleeping brings one more copy.
struct CopyingClock final : Clock {
  explicit CopyingClock(LateCopies& copies) : device(copies) {}
  double now() override { return seconds; }
  void sleep(double) override { ++seconds, ++device.first; }
  LateCopies& device;
  double seconds = 0;
};

int wrong_rows_of(int layer, const KvView& view, std::span<const int32_t> tokens, uint64_t salt) {
  int wrong = 0, row_index = 0;
  each_row(view, tokens, salt, 0, [&](std::byte* row, uint64_t pattern) {
    const bool its = row_index++ / (2 * kTinyShape.n_kv_heads) % kTinyShape.n_layers == layer;
    wrong += its && std::memcmp(row, &pattern, sizeof pattern) != 0;
  });
  return wrong;
}

TEST_CASE("tiers: who has the first layer of its KV can begin, and waits for the others", "[tiers][tier_layers]") {
  for (const char* scheme : kSchemes)
    for (const KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (const int disk : {0, 64})
        for (const bool gives_up : {false, true}) {
          INFO(scheme << " order " << int(order) << " disk " << disk << " gives up " << gives_up);
          LateCopies device;
          CopyingClock clock(device);
          Tiered t({.scheme = scheme,
                    .order = order,
                    .pool_tokens = 256,
                    .host_blocks = disk ? 20 : 40,
                    .disk_blocks = disk,
                    .device = &device,
                    .clock = &clock});
          t.kv->load_by_layer();
          const auto tokens = tokens_of(1, 22);
          const auto known = std::span(tokens).first(20);
          for (int family = 1; family < (disk ? 8 : 2); ++family) {
            t.run(tokens_of(family, 22));
            t.kv->drain();
          }
          device.late = true, device.first = 0;
          const int64_t before = t.stats().bytes_in;
          const KvReservation r = t.kv->reserve(tokens, 0).value();
          REQUIRE(r.loading);
          // What the disk has delivered meanwhile has begun to come whole: nothing has been copied yet.
          while (t.stats().bytes_in - before < int64_t(5 * kBlockBytes)) REQUIRE(!t.kv->ready(r.handle));
          each_row(t.kv->view(r.handle), known, 0, 0, [](std::byte* row, uint64_t) { std::memset(row, 0, 8); });
          CHECK(t.kv->arrival(r.handle) == nullptr);
          std::shared_ptr<KvArrival> arrival;
          for (int copies = 1; !arrival; ++copies) {  // without a disk, the first one is the first layer's
            REQUIRE((disk || copies == 1));
            device.first = 1;
            REQUIRE(!t.kv->ready(r.handle));
            arrival = t.kv->arrival(r.handle);
          }
          CHECK(t.kv->written_tokens(r.handle) == 0);
          const double began = clock.seconds;
          CHECK(arrival->wait(0));
          CHECK(clock.seconds == began);
          CHECK(wrong_rows_of(0, t.kv->view(r.handle), known, 0) == 0);
          CHECK(wrong_rows_of(1, t.kv->view(r.handle), known, 0) > 0);
          REQUIRE(t.kv->append(r.handle, 22));
          t.kv->check_invariants(true);
          if (gives_up) {
            t.kv->free(r.handle);
            t.kv->check_invariants(true);
            CHECK(t.kv->stats().active + t.kv->stats().in_transfer > 0);
            clock.sleep(0);
            t.kv->poll();
            CHECK_FALSE(arrival->is_whole());
            CHECK(t.stats().host_hit_tokens + t.stats().disk_hit_tokens == 0);
          } else {
            write_rows(t.kv->view(r.handle), tokens, 0, 20);
            CHECK(arrival->wait(1));
            CHECK(clock.seconds == began + 1);
            CHECK(wrong_rows(t.kv->view(r.handle), tokens, 0) == 0);
            CHECK(arrival->is_whole());
            CHECK(t.kv->ready(r.handle));
            CHECK(t.kv->written_tokens(r.handle) == 20);
            t.kv->written(r.handle, std::span(tokens).subspan(20));
            CHECK(t.stats().host_hit_tokens + t.stats().disk_hit_tokens == 20);
            t.kv->free(r.handle);
          }
          arrival.reset();
          device.late = false;
          t.kv->drain();
          const KvStats s = t.kv->stats();
          CHECK(s.free + s.cached == s.capacity);
          CHECK(t.run(tokens) == 20);
          t.kv->check_invariants(true);
        }
}

TEST_CASE("tiers: a disk that fails costs computing, not tokens", "[tiers]") {
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
    for (int round = 0; round < 4; ++round)
      for (int family = 0; family < 6; ++family) {
        cached += t.run(tokens_of(family, 22));
        t.kv->drain();
        t.kv->check_invariants(true);
      }
    const KvTierStats s = t.stats();
    if (c.what == std::string("full")) CHECK((s.failed_writes > 0 && s.disk_blocks == 0));
    if (c.what == std::string("gone")) CHECK((s.failed_reads >= 3 && s.failed_reads < 20));
    if (c.what == std::string("short")) CHECK((s.failed_reads >= 3 && s.failed_reads < 20));
    if (c.what == std::string("changed")) CHECK(s.corrupt_reads > 3);
    CHECK(s.disk_hit_tokens == 0);
    CHECK(cached == s.host_hit_tokens);
  }
}

// What the kernel does with operations when it has no memory for them.
TEST_CASE("disk file: operations that the kernel does not take are tried again, then fail", "[tiers]") {
  TempDir dir;
  std::atomic<int> refuse{0};  // so many times more; negative: always
  const auto refusal = [&] {
    if (refuse == 0) return 0;
    --refuse;
    return refuse % 2 ? -ENOMEM : -EAGAIN;
  };
  auto opened = DiskFile::open(dir.path, DiskFile::kSector, 64, {}, refusal);
  REQUIRE(opened.ok());
  DiskFile& disk = *opened.value();
  auto memory = cpu_device().allocate_host(64 * DiskFile::kSector).value();
  const auto write = [&](int n) {
    for (int i = 0; i < n; ++i) {
      std::memset(memory.get() + size_t(i) * DiskFile::kSector, i + 1, DiskFile::kSector);
      disk.write(i, memory.get() + size_t(i) * DiskFile::kSector, i);
    }
    std::vector<DiskFile::Done> done;
    while (int(done.size()) < n) disk.take(done);
    return done;
  };
  refuse = 5;
  for (const DiskFile::Done& d : write(40)) CHECK(d.outcome == DiskFile::Outcome::done);
  CHECK(refuse == 0);
  refuse = -1;
  for (int round = 0; round < 2; ++round)  // more than the ring has room for
    for (const DiskFile::Done& d : write(50)) {
      CHECK(d.outcome == DiskFile::Outcome::failed);
      CHECK((d.error == ENOMEM || d.error == EAGAIN));
    }
  refuse = 0;
  std::vector<DiskFile::Done> done = write(64);
  for (const DiskFile::Done& d : done) CHECK(d.outcome == DiskFile::Outcome::done);
  for (int i = 0; i < 64; ++i) {
    const auto own = std::find_if(done.begin(), done.end(), [i](const auto& d) { return d.id == i; });
    disk.read(i, memory.get() + size_t(63 - i) * DiskFile::kSector, own->checksum, 100 + i);
  }
  done.clear();
  while (done.size() < 64) disk.take(done);
  for (const DiskFile::Done& d : done) CHECK(d.outcome == DiskFile::Outcome::done);
  for (int i = 0; i < 64; ++i) CHECK(memory.get()[size_t(63 - i) * DiskFile::kSector + 17] == std::byte(i + 1));
}

TEST_CASE("tiers: a kernel that takes no operations costs the disk tier, not tokens", "[tiers]") {
  for (int refusals : {8, 1 << 30}) {
    CAPTURE(refusals);
    Setup setup{.host_blocks = 20, .disk_blocks = 64};
    auto left = std::make_shared<std::atomic<int>>(refusals);
    setup.seams.disk_refusal = [left] { return left->fetch_sub(1) > 0 ? -ENOMEM : 0; };
    Tiered t(setup);
    for (int round = 0; round < 2; ++round)
      for (int family = 0; family < 6; ++family) {
        t.run(tokens_of(family, 22));
        t.kv->drain();
        t.kv->check_invariants(true);
      }
    const KvTierStats s = t.stats();
    if (refusals == 8) CHECK((s.failed_writes == 0 && s.disk_hit_tokens > 0));
    if (refusals > 8) CHECK((s.failed_writes > 0 && s.disk_blocks == 0));
  }
}

TEST_CASE("tiers: options that cannot be met are told by name", "[tiers]") {
  TempDir dir;
  auto error = [&](auto change) {
    KvTierOptions o{.host_bytes = 64 * kBlockBytes, .block_tokens = kBlock};
    change(o);
    auto tiers = KvTiers::create(kTinyShape, o, cpu_device(), {});
    REQUIRE(!tiers);
    return tiers.error().message;
  };
  auto has = [](const std::string& text, const char* part) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  has(error([](auto& o) { o.host_bytes = 100; }), "--host-kv-bytes is 100");
  has(error([](auto& o) {
        o.host_bytes = size_t(1) << 36;
        o.block_tokens = 4096;
      }),
      "--host-kv-bytes: 68719476736 bytes: this machine has");
  has(error([&](auto& o) {
        o.host_bytes = 0;
        o.disk_dir = dir.path;
      }),
      "needs --host-kv-bytes");
  has(error([](auto& o) { o.host_eviction = "mru"; }), "expected one of lru, lfu, length_aware, fifo");
  auto disk = [&](const std::string& path, size_t bytes) {
    return error([&](auto& o) {
      o.disk_dir = path;
      o.disk_bytes = bytes;
    });
  };
  has(disk(dir.path + "/none", 1 << 20), "expected a folder");
  has(disk("/dev/null", 1 << 20), "expected a folder");
  has(disk(dir.path, 100), "--disk-kv-bytes is 100: one block takes 4096");
  has(disk(dir.path, size_t(1) << 50), "the disk has");
  has(disk("/proc", 1 << 20), "/proc");
}

TEST_CASE("tiers: forgotten by another thread while blocks are found, loaded and stored", "[tiers][stress]") {
  for (const char* scheme : kSchemes)
    for (int disk : {0, 64}) {
      INFO(scheme << " disk " << disk);
      LateCopies device;  // made at once, so that nearly every round has something to find
      Setup setup{.scheme = scheme,
                  .pool_tokens = 256,
                  .max_tokens = 128,
                  .host_blocks = disk ? 40 : 128,
                  .disk_blocks = disk,
                  .device = &device};
      Tiered t(setup);
      std::atomic<bool> done{false};
      std::atomic<int> forgotten{0}, rounds{0};
      std::thread other([&] {  // within a round as it falls, but with rounds between that find some
        for (int next = 0; !done; next = rounds + forgotten % 16) {
          while (rounds < next && !done) std::this_thread::yield();
          t.kv->clear_prefix_cache();
          ++forgotten;
        }
      });
      int cached = 0;
      for (; rounds < 1000 || forgotten < 30; ++rounds) {
        cached += t.run(tokens_of(rounds % 3, 100));  // what came back is right, or it fails
        if (rounds % 16 == 0) t.kv->check_invariants(false);
      }
      done = true;
      other.join();
      if (disk == 0) CHECK(cached > 1000);  // with one that is busy, blocks may find no slot
      t.kv->clear_prefix_cache();
      t.kv->drain();  // what was being written could not go
      t.kv->clear_prefix_cache();
      CHECK(t.stats().host_blocks + t.stats().disk_blocks == 0);
      t.kv->check_invariants(true);
    }
}

TEST_CASE("tiers: a sequence that goes while one of its blocks is copied out frees the others", "[tiers]") {
  struct {
    const char* scheme;
    KvOrder order;
    int tokens, held;  // blocks of the pool while the last tier block is on its way
  } rows[] = {{"paged", KvOrder::layer_major, 32, 1},
              {"token", KvOrder::token_major, 32, 4},
              {"contiguous", KvOrder::layer_major, 32, 1}};
  for (const auto& row : rows) {
    CAPTURE(row.scheme);
    LateCopies device;
    Tiered t({.scheme = row.scheme, .order = row.order, .device = &device});
    const auto tokens = tokens_of(1, row.tokens);
    const KvHandle handle = t.kv->reserve(tokens, 0).value().handle;
    REQUIRE(t.kv->append(handle, row.tokens));
    write_rows(t.kv->view(handle), tokens, 0, 0);
    const int before = row.tokens - kBlock;
    t.kv->written(handle, std::span(tokens).first(size_t(before)));
    t.kv->drain();
    device.late = true;
    t.kv->written(handle, std::span(tokens).subspan(size_t(before)));
    t.kv->free(handle);
    const KvStats s = t.kv->stats();
    CHECK(s.in_transfer == row.held);
    CHECK(s.available() == s.capacity - row.held);
    device.late = false;
    t.kv->drain();
    CHECK(t.kv->stats().available() == s.capacity);
    CHECK(t.run(tokens) == before);  // never the last token: seven blocks
    t.kv->check_invariants(true);
  }
}

// What somebody knows of the tiers who only listens.
class Picture final : public CacheListener {
 public:
  explicit Picture(std::vector<uint64_t> salts) : salts_(std::move(salts)) {}
  void stored(Tier tier, uint64_t hash, std::optional<uint64_t> parent, std::span<const int32_t> tokens) override {
    CHECK(tier != Tier::device);
    REQUIRE(tokens.size() == size_t(kBlock));
    CHECK(held_[int(tier)].insert(hash).second);
    const auto after = [&](uint64_t before) { return prefix_hash(before, !parent, tokens.data(), kBlock) == hash; };
    CHECK((parent ? after(*parent) : std::ranges::any_of(salts_, after)));
    ++told_[int(tier)];
  }
  void removed(Tier tier, uint64_t hash) override { CHECK(held_[int(tier)].erase(hash) == 1); }
  void check(const KvTiers& tiers) const {
    for (const Tier tier : {Tier::host, Tier::disk}) {
      const std::vector<uint64_t> there = tiers.held(tier);
      REQUIRE(there.size() == held_[int(tier)].size());
      for (uint64_t hash : there) REQUIRE(held_[int(tier)].contains(hash));
    }
  }
  int64_t told(Tier tier) const { return told_[int(tier)]; }
  const std::set<uint64_t>& held(Tier tier) const { return held_[int(tier)]; }

 private:
  const std::vector<uint64_t> salts_;
  std::set<uint64_t> held_[kTiers];
  int64_t told_[kTiers] = {};
};

TEST_CASE("tiers: a listener names what each holds as a router does", "[tiers]") {
  const auto picture = std::make_shared<Picture>(std::vector<uint64_t>{0, 7});
  LateCopies device;
  Tiered t({.host_blocks = 12, .disk_blocks = 64, .device = &device, .listener = picture});
  const auto tokens = tokens_of(1, 22);
  device.late = true;
  const KvHandle handle = t.kv->reserve(tokens, 7).value().handle;
  REQUIRE(t.kv->append(handle, 22));
  write_rows(t.kv->view(handle), tokens, 7, 0);
  t.kv->written(handle, tokens);
  CHECK(t.kv->promise(tokens, 7) == 20);
  CHECK(picture->held(Tier::host).empty());  // it is on its way
  device.late = false;
  t.kv->drain();
  t.kv->free(handle);
  const std::vector<uint64_t> hashes = prefix_hashes(tokens, kBlock, 7);
  CHECK(picture->held(Tier::host) == std::set<uint64_t>(hashes.begin(), hashes.end()));
  for (int family = 2; family < 8; ++family) {
    t.run(tokens_of(family, 22));
    t.kv->drain();
  }
  for (uint64_t hash : hashes) {
    CHECK(picture->held(Tier::disk).contains(hash));
    CHECK_FALSE(picture->held(Tier::host).contains(hash));
  }
  t.kv->clear_prefix_cache();
  CHECK(picture->held(Tier::host).empty());
  CHECK(picture->held(Tier::disk).empty());
}

// Seeds of tests below that break things on purpose.
struct Config {
  Setup setup;
  bool faults = false, by_layer = false;
  int operations = 10'000;
};

// What all trials did: a disk's pace is not theirs, so one alone may have met little.
struct Totals {
  int loads = 0, cancelled = 0, short_loads = 0, aliased = 0, begun = 0, begun_cancelled = 0;
  int64_t host_evictions = 0, disk_hit_tokens = 0, failures = 0;
};

class Trial {
 public:
  Trial(const Config& config, uint64_t seed)
      : config_(config), random_(seed), fault_random_(seed + 1), t_(with_faults(config)) {
    if (config.by_layer) device_.slow = true, kv().load_by_layer();
  }

  void run(Totals& totals) {
    for (int i = 0; i < config_.operations; ++i) {
      step();
      kv().check_invariants(true);
      picture_->check(kv().tiers());
    }
    for (KvLease lease : leases_) kv().unpin(lease);
    for (Live& s : live_) kv().free(s.handle);
    kv().drain();
    const KvStats before = kv().stats();
    CHECK(before.free + before.cached == before.capacity);
    kv().clear_prefix_cache();
    kv().drain();
    kv().clear_prefix_cache();
    kv().check_invariants(true);
    picture_->check(kv().tiers());
    CHECK(picture_->told(Tier::host) > 0);
    const KvTierStats s = kv().stats().tiers;
    CHECK((picture_->told(Tier::disk) > 0) == (s.disk_bytes_written > 0));
    CHECK(s.host_blocks + s.disk_blocks == 0);
    totals.aliased += aliased_;
    totals.loads += loads_;
    totals.cancelled += cancelled_;
    totals.begun += begun_, totals.begun_cancelled += begun_cancelled_;
    totals.short_loads += short_loads_;
    totals.host_evictions += s.host_evictions;
    totals.disk_hit_tokens += s.disk_hit_tokens;
    totals.failures += s.corrupt_reads + s.failed_reads;
  }

 private:
  struct Live {
    KvHandle handle;
    uint64_t salt;
    std::vector<int32_t> tokens;  // written
    std::vector<int32_t> prompt;  // to write still
    bool loading;
    int promised;
    std::shared_ptr<KvArrival> arrival = {};
  };

  Setup with_faults(const Config& config) {
    Setup s = config.setup;
    s.listener = picture_;
    if (config.by_layer) s.device = &device_;
    if (config.faults)
      s.seams.disk_fault = [this](bool write, std::span<std::byte> data, int result) {
        const uint64_t what = fault_random_.below(12);
        if (write) return result;
        if (what == 0) data[fault_random_.below(data.size())] ^= std::byte{1};
        if (what == 1) {
          // Not too often: the disk is given up after some.
          return fault_count_++ < 2 ? result / 2 : result;
        }
        return result;
      };
    return s;
  }
  TieredMemory& kv() { return *t_.kv; }

  // A disk takes as long as thousands of operations here.
  void settle(bool wholly) {
    if (wholly) kv().drain();
    kv().poll();
    for (Live& s : live_)
      if (s.loading) check_ready(s);
  }

  // The beginning of one of a few texts, and sometimes an end of its own.
  std::vector<int32_t> draw_tokens() {
    const size_t n = 1 + random_.below(size_t(config_.setup.max_tokens));
    std::vector<int32_t> tokens = tokens_of(int(random_.below(5)), int(n));
    if (random_.below(3) == 0)
      for (size_t i = random_.below(n); i < n; ++i) tokens[i] = int32_t(random_.below(3));
    return tokens;
  }

  void step() {
    const uint64_t what = random_.below(100);
    if (what < 25) return live_.size() < 6 ? reserve() : release(random_.below(live_.size()));
    if (what < 26) return kv().clear_prefix_cache();
    if (what < 30 && !leases_.empty()) {
      kv().unpin(leases_.back());
      return leases_.pop_back();
    }
    if (what < 34) return settle(random_.below(2) == 0);
    if (live_.empty()) return;
    const size_t i = random_.below(live_.size());
    if (live_[i].loading) {
      if (what < 45) {  // cancelled while it is under way
        ++cancelled_;
        begun_cancelled_ += live_[i].arrival != nullptr;
        return release(i);
      }
      if (live_[i].arrival) return begin(live_[i]);
      if (what < 60 && (live_[i].arrival = kv().arrival(live_[i].handle))) return void(++begun_);
      if (what < 70)
        while (!kv().ready(live_[i].handle)) std::this_thread::yield();
      return check_ready(live_[i]);
    }
    if (what < 70) return grow(live_[i]);
    if (what < 76) return fork(i);
    if (what < 79) {
      const int end = 1 + int(random_.below(live_[i].tokens.size() + 1));
      return leases_.push_back(kv().pin(live_[i].handle, int(random_.below(size_t(end))), end));
    }
    if (what < 83 && (leases_.empty() || config_.setup.scheme == "paged")) return pass_on(live_[i]);
    if (what < 94) return release(i);
    kv().trim(live_[i].handle);
  }

  void reserve() {
    Live s{kNoKv, random_.below(2) * 77, {}, draw_tokens(), false, 0};
    const Result<KvReservation> r = kv().reserve(s.prompt, s.salt);
    if (!r) return;
    s.handle = r.value().handle;
    s.loading = r.value().loading;
    s.promised = r.value().cached_tokens;
    REQUIRE(s.promised < int(s.prompt.size()));
    loads_ += s.loading;
    for (int32_t row : kv().blocks(s.handle)) aliased_ += t_.pool->users(row) > 1;
    if (!s.loading) take(s, s.promised);
    if (s.loading && config_.by_layer && random_.below(2) == 0) {  // it begins as soon as it can
      while (!(s.arrival = kv().arrival(s.handle)) && !kv().ready(s.handle)) std::this_thread::yield();
      begun_ += s.arrival != nullptr;
      if (s.arrival && random_.below(4) == 0) {
        ++begun_cancelled_;
        return kv().free(s.handle);
      }
    }
    live_.push_back(std::move(s));
  }

  void take(Live& s, int n) {
    s.tokens.assign(s.prompt.begin(), s.prompt.begin() + n);
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + n);
    REQUIRE(kv().written_tokens(s.handle) == n);
    REQUIRE(wrong_rows(kv().view(s.handle), s.tokens, s.salt) == 0);
  }

  void check_ready(Live& s) {
    if (!kv().ready(s.handle)) return;
    s.loading = false;
    s.arrival.reset();
    const int n = kv().written_tokens(s.handle);
    REQUIRE(n <= s.promised);
    short_loads_ += n < s.promised;
    take(s, n);
  }

  // Its first step, while KV comes.
  void begin(Live& s) {
    const size_t n = std::min(s.prompt.size() - size_t(s.promised), 1 + size_t(random_.below(2 * kBlock)));
    if (!kv().append(s.handle, s.promised - kv().written_tokens(s.handle) + int(n))) return;
    const std::span<const int32_t> all = std::span(s.prompt).first(size_t(s.promised) + n);
    write_rows(kv().view(s.handle), all, s.salt, s.promised);
    for (int layer = 0; layer < kTinyShape.n_layers; ++layer) {
      REQUIRE(s.arrival->wait(layer));
      REQUIRE(wrong_rows_of(layer, kv().view(s.handle), all, s.salt) == 0);
    }
    REQUIRE(s.arrival->is_whole());
    REQUIRE(kv().written_tokens(s.handle) == s.promised);
    kv().written(s.handle, all.subspan(size_t(s.promised)));
    s.loading = false;
    s.arrival.reset();
    take(s, int(all.size()));
  }

  void grow(Live& s) {
    size_t n = 1 + random_.below(2 * kBlock);
    if (!s.prompt.empty()) n = std::min(n, s.prompt.size());
    n = std::min(n, size_t(config_.setup.max_tokens) - s.tokens.size());
    while (s.prompt.size() < n) s.prompt.push_back(int32_t(random_.below(3)));
    if (!kv().append(s.handle, int(n))) {
      if (random_.below(2) == 0) release(random_.below(live_.size()));
      return;
    }
    const size_t done = s.tokens.size();
    s.tokens.insert(s.tokens.end(), s.prompt.begin(), s.prompt.begin() + ptrdiff_t(n));
    s.prompt.erase(s.prompt.begin(), s.prompt.begin() + ptrdiff_t(n));
    write_rows(kv().view(s.handle), s.tokens, s.salt, int(done));
    kv().written(s.handle, std::span<const int32_t>(s.tokens).subspan(done));
    REQUIRE(wrong_rows(kv().view(s.handle), s.tokens, s.salt) == 0);
  }

  void fork(size_t i) {
    const Result<KvHandle> child = kv().fork(live_[i].handle);
    if (!child) return;
    Live s = live_[i];
    s.handle = child.value();
    live_.push_back(std::move(s));
  }

  void pass_on(Live& s) {
    KvHandover handover = kv().handoff().hand_over(s.handle);
    REQUIRE(handover.tokens == int(s.tokens.size()));
    const KvHandle handle = kv().handoff().adopt(std::move(handover), s.tokens, s.salt);
    s.handle = handle;
    if (handle == kNoKv) {
      std::swap(s, live_.back());
      return live_.pop_back();
    }
    REQUIRE(wrong_rows(kv().view(handle), s.tokens, s.salt) == 0);
  }

  void release(size_t i) {
    kv().free(live_[i].handle);
    std::swap(live_[i], live_.back());
    live_.pop_back();
  }

  const Config config_;
  Random random_, fault_random_;
  int fault_count_ = 0;
  const std::shared_ptr<Picture> picture_ = std::make_shared<Picture>(std::vector<uint64_t>{0, 77});
  LateCopies device_;
  Tiered t_;
  std::vector<Live> live_;
  std::vector<KvLease> leases_;
  int loads_ = 0, cancelled_ = 0, short_loads_ = 0, aliased_ = 0, begun_ = 0, begun_cancelled_ = 0;
};

TEST_CASE("tiers: random operations against a trivially correct model", "[tiers][random]") {
  uint64_t seed = 0;
  Totals totals;
  for (const char* scheme : kSchemes)
    for (int disk : {0, 24})
      for (bool faults : {false, true}) {
        if (faults && disk == 0) continue;
        ++seed;
        for (const bool by_layer : {false, true}) {
          Config c{{.scheme = scheme,
                    .order = seed % 2 ? KvOrder::layer_major : KvOrder::token_major,
                    .prefix_cache = seed % 4 == 0,
                    .host_blocks = disk ? 10 : 16,
                    .disk_blocks = disk},
                   faults,
                   by_layer,
                   by_layer ? 4'000 : 10'000};
          c.setup.host_eviction = c.setup.disk_eviction = kEvictionPolicies[seed % std::size(kEvictionPolicies)].name;
          if (seed % 2) c.setup.seams.key_mask = 0x7;  // collisions
          if (std::string(scheme) == "contiguous") c.setup.pool_tokens = 8 * 32;
          INFO(scheme << " disk " << disk << " faults " << faults << " by layer " << by_layer << " seed " << seed);
          Trial(c, 2 * seed + by_layer).run(totals);
        }
      }
  // The pool's own hits end within its blocks, and within those of the tiers.
  for (int disk : {0, 24})
    Trial({{.prefix_cache = true, .host_blocks = 16, .disk_blocks = disk, .radix = true}, false, disk == 0, 6'000}, 50)
        .run(totals);
  // Rows of 64 tokens, which sequences share by a second mapping.
  Config c{{.scheme = "vattention",
            .order = KvOrder::token_major,
            .max_tokens = 160,
            .host_blocks = 60,
            .share = KvShare::alias}};
  Totals sharing;
  // How often depends on how soon copies are done: some 15 times a trial.
  for (uint64_t trial = 0; trial < 6; ++trial) Trial(c, 99 + trial).run(sharing);
  CHECK(sharing.aliased > 10);
  CHECK(sharing.loads > 20);
  CHECK(totals.loads > 1000);
  CHECK(totals.cancelled > 100);
  CHECK(totals.begun > 100);
  CHECK(totals.begun_cancelled > 20);
  CHECK(totals.short_loads > 0);
  CHECK(totals.host_evictions > 1000);
  CHECK(totals.disk_hit_tokens > 500);
  CHECK(totals.failures > 1);
}

}  // namespace
}  // namespace xpyd::testing::tiered_test
