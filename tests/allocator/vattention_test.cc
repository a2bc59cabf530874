// Tests vattention, contiguous addresses with memory only behind what is used: which page-group rows are mapped, when,
// and by which thread.
#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "allocator/schemes.h"
#include "base/device/page_groups.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::vattention_test {

constexpr int kRow = 256, kPlanes = 2 * kTinyShape.n_layers;

std::vector<int32_t> tokens_of(int n, int kind) { return counting(n, kind * 10'000); }

// Page groups that distinguish the owner's maps from the mapper's, and fail on demand.
class Watched final : public PageGroups {
 public:
  explicit Watched(std::shared_ptr<PageGroups> groups) : PageGroups(groups->options()), groups_(std::move(groups)) {}
  Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override {
    auto range = std::make_unique<Range>(*this, groups_->reserve(bytes).value());
    return std::unique_ptr<VirtualRange>(std::move(range));
  }
  std::atomic<int> by_owner{0}, by_mapper{0};
  std::atomic<int> fail_after{1 << 30};  // maps that succeed from now on; then one fails
  std::atomic<int> mapped{0};            // groups that are mapped now

 private:
  class Range final : public VirtualRange {
   public:
    Range(Watched& owner, std::unique_ptr<VirtualRange> range) : owner_(owner), range_(std::move(range)) {
      data_ = range_->data();
      bytes_ = range_->bytes();
    }
    Status map(size_t offset, int group, int n) override {
      owner_.enter();
      if (owner_.fail_after-- == 0) return Error{ErrorCode::unavailable, "told to fail"};
      owner_.mapped += n;
      return range_->map(offset, group, n);
    }
    void unmap(size_t offset, int n) override {
      owner_.mapped -= n;
      range_->unmap(offset, n);
    }

   private:
    Watched& owner_;
    std::unique_ptr<VirtualRange> range_;
  };
  void enter() { ++(std::this_thread::get_id() == owner_ ? by_owner : by_mapper); }
  const std::thread::id owner_ = std::this_thread::get_id();
  std::shared_ptr<PageGroups> groups_;
};

struct WatchedMemory {
  explicit WatchedMemory(KvOptions o, bool ahead = true) {
    o.vattention.map_ahead = ahead;
    const KvLayout layout = plan_pool("vattention", o).value();
    groups = std::make_shared<Watched>(make_host_page_groups({4096, layout.n_blocks * kPlanes}).value());
    pool = std::make_shared<PageGroupRows>(layout, KvShards{}, std::vector<std::shared_ptr<PageGroups>>{groups});
    kv = find_kv_scheme("vattention")->make(pool, o);
  }
  std::shared_ptr<Watched> groups;
  std::shared_ptr<PageGroupRows> pool;
  std::unique_ptr<KvMemory> kv;
};

TEST_CASE("vattention: a later sequence takes the first idle slot and maps only the missing rows",
          "[allocator][vattention]") {
  Memory m(vattention_options(64, 4, 2048), "vattention");
  const KvHandle a = fill(*m.kv, tokens_of(kRow, 1), 0).handle, b = fill(*m.kv, tokens_of(4 * kRow, 2), 0).handle,
                 c = fill(*m.kv, tokens_of(2 * kRow, 3), 0).handle;
  // The rows are adjacent in the pool: one call per plane, whatever the length.
  CHECK(m.kv->stats().vattention.map_calls == 3 * kPlanes);
  const int slot_of_a = m.kv->view(a).slot, slot_of_b = m.kv->view(b).slot;
  for (KvHandle handle : {a, b, c}) m.kv->free(handle);
  const KvStats idle = m.kv->stats();
  CHECK(idle.cached == 7);
  CHECK(idle.available() == idle.capacity);
  CHECK(idle.vattention.unmap_calls == 0);
  const KvHandle d = fill(*m.kv, tokens_of(2 * kRow, 4), 0).handle;
  CHECK(m.kv->view(d).slot == slot_of_a);
  CHECK(m.kv->stats().vattention.map_calls == 4 * kPlanes);  // a's slot has one row
  const KvHandle e = fill(*m.kv, tokens_of(3 * kRow, 5), 0).handle;
  CHECK(m.kv->view(e).slot == slot_of_b);
  CHECK(m.kv->stats().vattention.map_calls == 4 * kPlanes);  // b's has four
  CHECK(wrong_rows(*m.kv, d, tokens_of(2 * kRow, 4), 0) == 0);
  m.kv->check_invariants();
}

TEST_CASE("vattention: steady-state decode makes no map call on the critical path", "[allocator][vattention]") {
  constexpr int kSequences = 64, kSteps = 2400;
  WatchedMemory m(vattention_options(64 * 16, kSequences, 4096));
  std::vector<KvHandle> handles;
  for (int i = 0; i < kSequences; ++i)  // ragged, so that rows end in different steps
    handles.push_back(fill(*m.kv, tokens_of(100 + 17 * i, i), 0).handle);
  m.kv->check_invariants();  // lets the mapper finish
  const KvStats before = m.kv->stats();
  m.groups->by_owner = m.groups->by_mapper = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (KvHandle handle : handles) {
      const int32_t token = step;
      REQUIRE(m.kv->append(handle, 1));
      m.kv->view(handle);
      m.kv->commit(handle, {&token, 1});
    }
    if (step % 4 == 0) m.kv->check_invariants();  // a step takes longer than its maps
  }
  CHECK(m.kv->stats().vattention.map_wait_seconds == before.vattention.map_wait_seconds);
  CHECK(m.groups->by_owner == 0);
  CHECK(m.groups->by_mapper >= (kSequences * kSteps / kRow - before.cached - kSequences) * kPlanes);
}

// Counts the mappings of memfds in this process.
int64_t counted_mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t n = 0;
  for (std::string line; std::getline(maps, line);) n += line.find("memfd:xpyd-kv") != line.npos;
  return n;
}

TEST_CASE("vattention: 64 tensors of 64 sequences of 64 groups stay below the limit of mappings",
          "[allocator][vattention]") {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int kTensors = 16;  // shadow memory is mapped, too
#else
  constexpr int kTensors = 64;
#endif
  KvOptions o = vattention_options(1, 64, 65 * 16);
  o.shape = {.n_layers = kTensors / 2, .n_kv_heads = 1, .head_dim = 64};  // 16 tokens in a page
  o.pool_bytes = size_t(64 * 64) * vattention_row_bytes(o);
  const long limit = max_mappings();
  if (limit < 65530) SKIP_TEST("vm.max_map_count is below its default");
  {
    Memory m(o, "vattention");
    std::vector<KvHandle> handles;
    for (int i = 0; i < 64; ++i) handles.push_back(m.kv->reserve(tokens_of(16, i), 0).value().handle);
    for (int i = 0; i < 16; ++i)  // in turn, as decoding sequences grow
      for (KvHandle handle : handles) {
        REQUIRE(m.kv->append(handle, 4 * 16));
        m.kv->commit(handle, tokens_of(4 * 16, i));
      }
    CHECK(m.kv->stats().free == 0);
    CHECK(counted_mappings() == m.kv->stats().mappings);
    // Rows come in runs of 16, so each sequence has four mappings in each tensor. Row by row it would be 64.
    CHECK(m.kv->stats().mappings <= 4 * 64 * kTensors);
    CHECK(m.kv->stats().mappings < limit / 2);
    m.kv->check_invariants();
  }
  CHECK(counted_mappings() == 0);
}

TEST_CASE("vattention: a map that the system refuses is undone and nothing is lost", "[allocator][vattention]") {
  for (bool ahead : {false, true})
    for (int fail = 0; fail < 14; ++fail) {
      CAPTURE(ahead, fail);
      WatchedMemory m(vattention_options(32, 4, 4096), ahead);
      auto tokens = tokens_of(3 * kRow, 1);
      const KvHandle a = fill(*m.kv, tokens, 0).handle;
      m.kv->check_invariants();
      m.groups->fail_after = fail;
      int refused = 0;
      for (int i = 0; i < 8; ++i) {
        if (!m.kv->append(a, kRow)) {
          ++refused;
          continue;
        }
        tokens = joined(tokens, tokens_of(kRow, i));
        extend(*m.kv, a, tokens, 0);
      }
      m.kv->check_invariants();
      CHECK(m.groups->fail_after < 0);  // the failure happened
      if (!ahead) CHECK(refused == 1);
      CHECK(refused <= 1);
      CHECK(wrong_rows(*m.kv, a, tokens, 0) == 0);
      CHECK(m.groups->mapped >= int(m.kv->blocks(a).size()) * kPlanes);
      m.kv->free(a);
      m.kv.reset();
      CHECK(m.pool->stats().free == m.pool->stats().capacity);
    }
}

}  // namespace xpyd::testing::vattention_test
