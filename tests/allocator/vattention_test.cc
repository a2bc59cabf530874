// vattention: contiguous addresses with memory behind what is used, against what each sequence wrote.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

#include "allocator/kv_plan.h"
#include "allocator/row_pool.h"
#include "base/page_groups.h"
#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::vattention_test {

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kOperations = 700;
#else
constexpr int kOperations = 2500;
#endif

KvOptions options_of(KvOrder order, int n_rows, int max_sequences, int max_tokens) {
  KvOptions o;
  o.shape = kTinyShape;  // a page is 256 tokens of one plane, or 64 of all
  o.order = order;
  o.vattention.page_group_bytes = 4096;
  o.vattention.max_sequences = max_sequences;
  o.max_sequence_tokens = max_tokens;
  o.pool_bytes = size_t(n_rows) * vattention_row_bytes(o);
  return o;
}

std::vector<int32_t> tokens_of(int n, int salt) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) tokens[size_t(i)] = (i * 7 + salt) % 5;
  return tokens;
}

// Page groups whose maps fail when told to.
class Faulty final : public PageGroups {
 public:
  explicit Faulty(std::shared_ptr<PageGroups> groups) : PageGroups(groups->options()), groups_(std::move(groups)) {}
  Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override {
    auto range = std::make_unique<Range>(*this, groups_->reserve(bytes).value());
    return std::unique_ptr<VirtualRange>(std::move(range));
  }
  std::atomic<int> fail_after{1 << 30};  // maps that succeed from now on; then one fails
  std::atomic<int> mapped{0};            // groups behind addresses now

 private:
  class Range final : public VirtualRange {
   public:
    Range(Faulty& owner, std::unique_ptr<VirtualRange> range) : owner_(owner), range_(std::move(range)) {
      data_ = range_->data();
      bytes_ = range_->bytes();
    }
    Status map(size_t offset, int group, int n) override {
      if (owner_.fail_after-- == 0) return Error{ErrorCode::unavailable, "told to fail"};
      owner_.mapped += n;
      return range_->map(offset, group, n);
    }
    void unmap(size_t offset, int n) override {
      owner_.mapped -= n;
      range_->unmap(offset, n);
    }

   private:
    Faulty& owner_;
    std::unique_ptr<VirtualRange> range_;
  };
  std::shared_ptr<PageGroups> groups_;
};

class Trial {
 public:
  Trial(const KvOptions& options, int n_memories, uint64_t seed) : o_(options), random_(seed) {
    pool_ = make_block_pool("vattention", o_).value();
    for (int i = 0; i < n_memories; ++i) memories_.push_back(find_kv_scheme("vattention")->make(pool_, o_));
  }
  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      step();
      check(i % 64 == 0);
    }
    for (auto& [memory, lease] : leases_) memories_[memory]->unpin(lease);
    leases_.clear();
    for (Flying& f : flying_) memories_[0]->handoff().discard(f.handover);
    flying_.clear();
    while (!live_.empty()) release(0);
    check(true);
    KvStats stats = memories_[0]->stats();
    CHECK(stats.in_transfer == 0);
    if (memories_.size() == 1) CHECK(stats.active == 0);
    memories_.clear();
    CHECK(pool_->stats().free == pool_->stats().capacity);
    const int often = operations / 200;
    CHECK(refused > often);
    CHECK(adopted > often);
    CHECK(forked > often);
  }
  int refused = 0, adopted = 0, forked = 0;

 private:
  struct Live {
    size_t memory;
    KvHandle handle;
    std::vector<int32_t> tokens;
    int pins;
  };
  struct Flying {
    KvHandover handover;
    std::vector<int32_t> tokens;
  };

  void step() {
    const uint64_t what = random_.below(100);
    if (what < 20) return reserve();
    if (what < 25 && !leases_.empty()) return unpin();
    if (what < 30 && !flying_.empty()) return land();
    if (live_.empty()) return;
    Live& s = live_[random_.below(live_.size())];
    KvMemory& kv = *memories_[s.memory];
    if (what < 70) return grow(s);
    if (what < 76) {
      Result<KvHandle> child = kv.fork(s.handle);
      if (!child) return void(++refused);
      ++forked;
      live_.push_back({s.memory, child.value(), s.tokens, 0});
    } else if (what < 80) {
      if (leases_.size() >= 3) return;
      const int begin = int(random_.below(s.tokens.size() + 1)),
                end = begin + 1 + int(random_.below(s.tokens.size() + 1));
      leases_.push_back({s.memory, kv.pin(s.handle, begin, end)}), ++s.pins;
    } else if (what < 84 && flying_.size() < 2 && s.pins == 0) {
      flying_.push_back({kv.handoff().hand_over(s.handle), s.tokens});
      live_.erase(live_.begin() + (&s - live_.data()));
    } else if (what < 96) {
      release(size_t(&s - live_.data()));
    } else {
      kv.trim(s.handle);
    }
  }
  void reserve() {
    Live s{random_.below(memories_.size()), kNoKv, {}, 0};
    const auto prompt = tokens_of(1 + int(random_.below(size_t(o_.max_sequence_tokens))), 0);
    Result<KvReservation> r = memories_[s.memory]->reserve(prompt, 0);
    if (!r) return void(++refused);
    s.handle = r.value().handle;
    live_.push_back(s);
  }
  void grow(Live& s) {
    KvMemory& kv = *memories_[s.memory];
    const int left = o_.max_sequence_tokens - int(s.tokens.size());
    if (left == 0) return;
    const int n = 1 + int(random_.below(size_t(std::min(left, random_.below(3) == 0 ? 400 : 9))));
    const KvStats before = kv.stats();
    const int row = before.block_tokens, has = int(kv.blocks(s.handle).size()),
              needs = (int(s.tokens.size()) + n + row - 1) / row - has;
    if (!kv.append(s.handle, n)) {
      ++refused;
      REQUIRE(needs > (memories_.size() == 1 ? before.available() : 0));  // a promise
      REQUIRE(int(kv.blocks(s.handle).size()) == has);
      if (random_.below(2) == 0) release(random_.below(live_.size()));
      return;
    }
    const size_t done = s.tokens.size();
    for (int i = 0; i < n; ++i) s.tokens.push_back(int32_t(random_.below(1000)));
    write_rows(kv.view(s.handle), s.tokens, 0, int(done));
    kv.written(s.handle, std::span<const int32_t>(s.tokens).subspan(done));
  }
  void unpin() {
    memories_[leases_.front().first]->unpin(leases_.front().second);
    leases_.erase(leases_.begin());
  }
  void land() {
    Flying f = std::move(flying_.back());
    flying_.pop_back();
    const size_t memory = random_.below(memories_.size());
    size_t mine = leases_.size();  // slots that a lease may keep
    for (const Live& s : live_) mine += s.memory == memory;
    if (int(mine) >= o_.vattention.max_sequences) return memories_[memory]->handoff().discard(f.handover);
    const KvHandle handle = memories_[memory]->handoff().adopt(f.handover, f.tokens, 0);
    live_.push_back({memory, handle, f.tokens, 0});
    ++adopted;
  }
  void release(size_t i) {
    memories_[live_[i].memory]->free(live_[i].handle);
    live_.erase(live_.begin() + ptrdiff_t(i));
  }
  void check(bool all) {
    for (auto& m : memories_) {
      m->check_invariants(memories_.size() == 1);
      const KvStats s = m->stats();
      REQUIRE(s.free + s.active + s.cached + s.in_transfer == s.capacity);
    }
    const size_t only = live_.empty() ? 0 : random_.below(live_.size());
    for (size_t i = 0; i < live_.size(); ++i) {
      const Live& s = live_[i];
      REQUIRE(memories_[s.memory]->written_tokens(s.handle) == int(s.tokens.size()));
      if (all || i == only) REQUIRE(wrong_rows(memories_[s.memory]->view(s.handle), s.tokens, 0) == 0);
    }
  }

  const KvOptions o_;
  Random random_;
  std::shared_ptr<KvPool> pool_;
  std::vector<std::unique_ptr<KvMemory>> memories_;
  std::vector<Live> live_;
  std::vector<Flying> flying_;
  std::vector<std::pair<size_t, KvLease>> leases_;
};

TEST_CASE("vattention: random operations against a model", "[allocator][vattention]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
    for (bool ahead : {true, false})
      for (bool guard : {true, false})
        for (int memories : {1, 2}) {
          CAPTURE(int(order), ahead, guard, memories);
          KvOptions o = options_of(order, 24, 7, order == KvOrder::layer_major ? 1500 : 500);
          o.vattention.map_ahead = ahead;
          o.vattention.guard = guard;
          o.keep_idle = memories == 1;
          Trial(o, memories, uint64_t(memories) + 2 * ahead + 4 * guard).run(kOperations);
        }
}

TEST_CASE("vattention: a later sequence takes the best fitting slot and maps only what is missing",
          "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 64, 4, 2048);
  o.vattention.map_ahead = false;
  Memory m(o, "vattention");
  const int row = vattention_row_tokens(o), planes = 2 * kTinyShape.n_layers;
  KvReservation a = fill(*m.kv, tokens_of(row, 1), 0), b = fill(*m.kv, tokens_of(4 * row, 2), 0),
                c = fill(*m.kv, tokens_of(2 * row, 3), 0);
  // Neighbours in the pool: one call per plane, whatever the length.
  CHECK(m.kv->stats().vattention.map_calls == 3 * planes);
  const KvView of_b = m.kv->view(b.handle), of_c = m.kv->view(c.handle);
  m.kv->free(a.handle);
  m.kv->free(b.handle);
  m.kv->free(c.handle);
  KvStats idle = m.kv->stats();
  CHECK(idle.cached == 7);
  CHECK(idle.available() == idle.capacity);
  CHECK(idle.vattention.unmap_calls == 0);
  // The first idle slot has too few rows and must not win (vattention's alloc_new_batch_idx).
  KvReservation d = fill(*m.kv, tokens_of(2 * row, 4), 0);
  CHECK(m.kv->view(d.handle).slot == of_c.slot);
  CHECK(m.kv->stats().vattention.map_calls == 3 * planes);
  KvReservation e = fill(*m.kv, tokens_of(3 * row, 5), 0);
  CHECK(m.kv->view(e.handle).slot == of_b.slot);
  CHECK(m.kv->stats().vattention.map_calls == 3 * planes);
  CHECK(wrong_rows(m.kv->view(d.handle), tokens_of(2 * row, 4), 0) == 0);
  m.kv->check_invariants();
}

TEST_CASE("vattention: idle rows are unmapped for those who need them, oldest first", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 8, 4, 2048);
  o.vattention.map_ahead = false;
  Memory m(o, "vattention");
  const int row = vattention_row_tokens(o);
  KvReservation a = fill(*m.kv, tokens_of(4 * row, 1), 0), b = fill(*m.kv, tokens_of(3 * row, 2), 0);
  m.kv->free(a.handle);
  KvReservation c = m.kv->reserve(tokens_of(row, 1), 0).value();  // takes a's slot with its 4 rows
  CHECK(m.kv->stats().cached == 4);
  const int64_t maps = m.kv->stats().vattention.map_calls;
  CHECK(m.kv->append(c.handle, 4 * row));
  CHECK(m.kv->stats().vattention.map_calls == maps);
  m.kv->free(c.handle);
  KvReservation d = m.kv->reserve(tokens_of(5 * row, 3), 0).value();
  CHECK(m.kv->append(d.handle, 5 * row));
  CHECK_FALSE(m.kv->append(d.handle, 6 * row));  // 3 + 6 > 8, and nothing has changed
  CHECK(m.kv->blocks(d.handle).size() == 5);
  CHECK(wrong_rows(m.kv->view(b.handle), tokens_of(3 * row, 2), 0) == 0);
  m.kv->check_invariants();
}

TEST_CASE("vattention: decoding maps in the background and does not wait", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 64, 4, 4096);
  Memory m(o, "vattention");
  const int row = vattention_row_tokens(o);
  KvReservation a = fill(*m.kv, tokens_of(row, 1), 0);
  m.kv->check_invariants();  // lets the mapper finish
  const KvStats before = m.kv->stats();
  for (int i = row; i < 6 * row; ++i) {
    REQUIRE(m.kv->append(a.handle, 1));
    const int32_t token = i % 5;
    m.kv->written(a.handle, {&token, 1});
    if (i % 4 == 0) m.kv->check_invariants();  // a step takes longer than a map
  }
  const KvStats after = m.kv->stats();
  CHECK(after.vattention.map_calls - before.vattention.map_calls >= 5 * 2 * kTinyShape.n_layers);
  CHECK(after.vattention.waited_jobs == before.vattention.waited_jobs);
}

// Page groups that tell the owner's maps from the mapper's, and can hold the mapper's up.
class Watched final : public PageGroups {
 public:
  explicit Watched(std::shared_ptr<PageGroups> groups) : PageGroups(groups->options()), groups_(std::move(groups)) {}
  Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override {
    auto range = std::make_unique<Range>(*this, groups_->reserve(bytes).value());
    return std::unique_ptr<VirtualRange>(std::move(range));
  }
  void close() { gate(false); }
  void open() { gate(true); }
  std::atomic<int> by_owner{0}, by_mapper{0};

 private:
  class Range final : public VirtualRange {
   public:
    Range(Watched& owner, std::unique_ptr<VirtualRange> range) : owner_(owner), range_(std::move(range)) {
      data_ = range_->data();
      bytes_ = range_->bytes();
    }
    Status map(size_t offset, int group, int n) override {
      owner_.enter();
      return range_->map(offset, group, n);
    }
    void unmap(size_t offset, int n) override { range_->unmap(offset, n); }

   private:
    Watched& owner_;
    std::unique_ptr<VirtualRange> range_;
  };
  void enter() {
    if (std::this_thread::get_id() == owner_) return void(++by_owner);
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return open_; });
    ++by_mapper;
  }
  void gate(bool open) {
    {
      std::lock_guard lock(mutex_);
      open_ = open;
    }
    opened_.notify_all();
  }
  const std::thread::id owner_ = std::this_thread::get_id();
  std::shared_ptr<PageGroups> groups_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = true;
};

std::shared_ptr<KvPool> watched_pool(const KvOptions& o, std::shared_ptr<Watched>& watched) {
  const KvLayout layout = plan_pool("vattention", o).value();
  const int planes = int(vattention_row_bytes(o) / o.vattention.page_group_bytes);
  watched = std::make_shared<Watched>(
      make_host_page_groups({o.vattention.page_group_bytes, layout.n_blocks * planes}).value());
  return std::make_shared<RowPool>(layout, KvShards{}, std::vector<std::shared_ptr<PageGroups>>{watched});
}

TEST_CASE("vattention: steady-state decode makes no map call on the critical path", "[allocator][vattention]") {
  constexpr int kSequences = 64, kSteps = 2400;
  KvOptions o = options_of(KvOrder::layer_major, 64 * 16, kSequences, 4096);
  std::shared_ptr<Watched> watched;
  auto kv = find_kv_scheme("vattention")->make(watched_pool(o, watched), o);
  std::vector<KvHandle> handles;
  for (int i = 0; i < kSequences; ++i)  // ragged, so that rows end in different steps
    handles.push_back(fill(*kv, tokens_of(100 + 17 * i, i), 0).handle);
  kv->check_invariants();  // lets the mapper finish
  const KvStats before = kv->stats();
  watched->by_owner = watched->by_mapper = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (KvHandle handle : handles) {
      const int32_t token = step;
      REQUIRE(kv->append(handle, 1));
      kv->view(handle);
      kv->written(handle, {&token, 1});
    }
    if (step % 4 == 0) kv->check_invariants();  // a step takes longer than its maps
  }
  const KvStats after = kv->stats();
  CHECK(after.vattention.waited_jobs == before.vattention.waited_jobs);
  CHECK(watched->by_owner == 0);
  const int rows = kSequences * kSteps / vattention_row_tokens(o);
  CHECK(watched->by_mapper >= (rows - before.cached - kSequences) * 2 * kTinyShape.n_layers);
}

TEST_CASE("vattention: who maps for itself waits for nobody else's rows", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 64, 4, 4096);
  std::shared_ptr<Watched> watched;
  auto kv = find_kv_scheme("vattention")->make(watched_pool(o, watched), o);
  const int row = vattention_row_tokens(o);
  KvReservation a = kv->reserve(tokens_of(row, 1), 0).value();
  kv->check_invariants();
  watched->close();
  REQUIRE(kv->append(a.handle, 3 * row));  // and asks the mapper for the next rows, in vain
  const int64_t jobs = kv->stats().vattention.waited_jobs;
  KvReservation b = kv->reserve(tokens_of(row, 2), 0).value();
  REQUIRE(kv->append(b.handle, 4 * row));  // would never come back
  const auto tokens = tokens_of(4 * row, 2);
  write_rows(kv->view(b.handle), tokens, 0, 0);
  CHECK(kv->stats().vattention.waited_jobs == jobs + 1);
  watched->open();
  kv->written(b.handle, tokens);
  CHECK(wrong_rows(kv->view(b.handle), tokens, 0) == 0);
  kv->check_invariants();
}

TEST_CASE("vattention: rows that a sequence does not need yet are there for others", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 8, 4, 2048);
  o.vattention.map_ahead = false;
  Memory m(o, "vattention");
  const int row = vattention_row_tokens(o);
  m.kv->free(fill(*m.kv, tokens_of(6 * row, 1), 0).handle);
  const auto tokens = tokens_of(row, 2);
  const KvHandle a = fill(*m.kv, tokens, 0).handle;  // in the slot with six rows
  CHECK(m.kv->blocks(a).size() == 1);
  CHECK(m.kv->stats().available() == 7);
  const KvHandle b = fill(*m.kv, tokens_of(7 * row, 3), 0).handle;
  CHECK(m.kv->stats().available() == 0);
  CHECK_FALSE(m.kv->append(a, 1));
  CHECK(wrong_rows(m.kv->view(a), tokens, 0) == 0);
  m.kv->free(b);
  CHECK(m.kv->append(a, 7 * row));
  m.kv->check_invariants();
}

// Mappings of memfds in this process.
int64_t counted_mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t n = 0;
  for (std::string line; std::getline(maps, line);) n += line.find("memfd:xpyd-kv") != line.npos;
  return n;
}

TEST_CASE("vattention: the mappings are those that the system counts", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 64, 6, 8 * 256 + 1);
  o.vattention.share = KvShare::alias;
  REQUIRE(counted_mappings() == 0);
  Memory m(o, "vattention");
  auto same = [&] {
    m.kv->check_invariants();
    CHECK(m.kv->stats().mappings == counted_mappings());
    CHECK(m.kv->stats().mapped_bytes ==
          (m.pool->layout().n_blocks - m.kv->stats().free) * int64_t(m.pool->block_bytes()));
  };
  same();
  std::vector<KvHandle> handles;
  for (int i = 0; i < 3; ++i) handles.push_back(m.kv->reserve(tokens_of(9, i), 0).value().handle);
  for (int i = 0; i < 6; ++i)
    for (KvHandle handle : handles) {
      REQUIRE(m.kv->append(handle, 256));
      m.kv->written(handle, tokens_of(256, int(handle) * 100 + i));
      same();
    }
  handles.push_back(m.kv->fork(handles[1]).value());
  same();
  m.kv->free(handles[1]);
  same();
  m.kv->handoff().discard(m.kv->handoff().hand_over(handles[0]));
  same();
}

TEST_CASE("vattention: 64 tensors of 64 sequences of 64 groups stay below the limit of mappings",
          "[allocator][vattention]") {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int kTensors = 16;  // shadow memory is mapped, too
#else
  constexpr int kTensors = 64;
#endif
  KvOptions o;
  o.shape = {.n_layers = kTensors / 2, .n_kv_heads = 1, .head_dim = 64};  // 16 tokens in a page
  o.vattention.page_group_bytes = 4096;
  o.vattention.max_sequences = 64;
  o.max_sequence_tokens = 65 * 16;
  o.vattention.map_ahead = false;
  o.pool_bytes = size_t(64 * 64) * vattention_row_bytes(o);
  const long limit = max_mappings();
  if (limit < 65530) SKIP_TEST("vm.max_map_count is below its default");
  {
    Memory m(o, "vattention");
    std::vector<KvHandle> handles;
    for (int i = 0; i < 64; ++i) handles.push_back(m.kv->reserve(tokens_of(16, i), 0).value().handle);
    for (int i = 0; i < 16; ++i)  // in turn, as decoding sequences do
      for (KvHandle handle : handles) {
        REQUIRE(m.kv->append(handle, 4 * 16));
        m.kv->written(handle, tokens_of(4 * 16, i));
      }
    CHECK(m.kv->stats().free == 0);
    CHECK(counted_mappings() == m.kv->stats().mappings);
    // Runs of 16 rows: four mappings of each sequence in each tensor; by the row it would be 64.
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
      KvOptions o = options_of(KvOrder::layer_major, 32, 4, 4096);
      o.vattention.map_ahead = ahead;
      KvLayout layout = plan_pool("vattention", o).value();
      const int planes = 2 * kTinyShape.n_layers;
      auto faulty = std::make_shared<Faulty>(make_host_page_groups({4096, layout.n_blocks * planes}).value());
      auto pool = std::make_shared<RowPool>(layout, KvShards{}, std::vector<std::shared_ptr<PageGroups>>{faulty});
      auto kv = find_kv_scheme("vattention")->make(pool, o);
      const int row = layout.block_tokens;
      auto tokens = tokens_of(3 * row, 1);
      KvReservation a = fill(*kv, tokens, 0);
      kv->check_invariants();
      faulty->fail_after = fail;
      int refused = 0;
      for (int i = 0; i < 8; ++i) {
        if (!kv->append(a.handle, row)) {
          ++refused;
          continue;
        }
        const size_t done = tokens.size();
        for (int t = 0; t < row; ++t) tokens.push_back(t % 3);
        write_rows(kv->view(a.handle), tokens, 0, int(done));
        kv->written(a.handle, std::span<const int32_t>(tokens).subspan(done));
      }
      kv->check_invariants();
      CHECK(faulty->fail_after < 0);  // it happened
      if (!ahead) CHECK(refused == 1);
      CHECK(refused <= 1);
      CHECK(wrong_rows(kv->view(a.handle), tokens, 0) == 0);
      CHECK(faulty->mapped >= int(kv->blocks(a.handle).size()) * planes);
      kv->free(a.handle);
      kv.reset();
      CHECK(pool->stats().free == pool->stats().capacity);
    }
}

TEST_CASE("vattention: a group that ends inside a token leaves the neighbour slot alone", "[allocator][vattention]") {
  for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major}) {
    CAPTURE(int(order));
    KvOptions o = options_of(order, 64, 3, 256);
    o.shape.head_dim = 6;  // 48 bytes of one plane or 192 of all: 85.3 or 21.3 tokens in a page
    o.pool_bytes = 64 * vattention_row_bytes(o);
    Memory m(o, "vattention");
    std::vector<KvHandle> handles;
    const auto tokens = tokens_of(256, 1);
    for (int i = 0; i < 3; ++i) handles.push_back(fill(*m.kv, tokens, 0).handle);
    for (KvHandle handle : handles) CHECK(wrong_rows(m.kv->view(handle), tokens, 0) == 0);
    m.kv->check_invariants();
  }
}

TEST_CASE("vattention: who has no addresses for a sequence does not adopt it", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::layer_major, 16, 2, 1024);
  o.keep_idle = false;
  const KvLayout layout = plan_pool("vattention", o).value();
  auto faulty = std::make_shared<Faulty>(
      make_host_page_groups({4096, layout.n_blocks * 2 * kTinyShape.n_layers}).value());
  auto pool = std::make_shared<RowPool>(layout, KvShards{}, std::vector<std::shared_ptr<PageGroups>>{faulty});
  auto p = find_kv_scheme("vattention")->make(pool, o), d = find_kv_scheme("vattention")->make(pool, o);
  const auto tokens = tokens_of(300, 1);
  auto hand_over = [&] { return p->handoff().hand_over(fill(*p, tokens, 0).handle); };
  KvHandover one = hand_over();
  faulty->fail_after = 1;
  CHECK(d->handoff().adopt(one, tokens, 0) == kNoKv);
  const KvHandle two = d->handoff().adopt(hand_over(), tokens, 0), three = d->handoff().adopt(hand_over(), tokens, 0);
  REQUIRE((two != kNoKv && three != kNoKv));
  CHECK(d->handoff().adopt(hand_over(), tokens, 0) == kNoKv);  // both slots are taken
  CHECK(wrong_rows(d->view(two), tokens, 0) == 0);
  CHECK(wrong_rows(d->view(three), tokens, 0) == 0);
  p.reset();
  d->check_invariants();
  d.reset();
  CHECK(pool->stats().free == pool->stats().capacity);
}

TEST_CASE("vattention: what cannot work is refused with a word", "[allocator][vattention]") {
  auto refuse = [](KvOptions o, const std::string& word) {
    Result<KvLayout> plan = plan_pool("vattention", o);
    REQUIRE_FALSE(plan.ok());
    INFO(plan.error().message);
    CHECK(plan.error().message.find(word) != std::string::npos);
  };
  KvOptions good = options_of(KvOrder::layer_major, 8, 4, 2048), o = good;
  CHECK(plan_pool("vattention", good).ok());
  o.vattention.page_group_bytes = 5000;
  refuse(o, "multiple of the page");
  o = good;
  o.pool_bytes = 4096;
  refuse(o, "too small for one row of page groups");
  o = good;
  o.vattention.max_sequences = 100000;
  o.pool_bytes = size_t(1) << 31;
  refuse(o, "vm.max_map_count");
  // Eight instances of what one may have.
  o = good;
  o.vattention.max_sequences = 2500;
  o.pool_bytes = 2500 * vattention_row_bytes(o);
  CHECK(plan_pool("vattention", o).ok());
  o.n_memories = 8;
  refuse(o, "8 instances of 2500 sequences");
  o = good;
  o.max_sequence_tokens = 1 << 24;
  o.vattention.max_sequences = 64;
  CHECK(plan_pool("vattention", o).ok());  // addresses suffice
  o.vattention.on_card = true;
  refuse(o, "fewer than 4294967296");
  o.vattention.on_card = false;
  o.vattention.max_sequences = 1 << 24;
  refuse(o, "a process has 2^47");
  // A card's mappings are none of the host's.
  o = good;
  o.vattention.max_sequences = 100000;
  o.pool_bytes = size_t(1) << 31;
  o.vattention.on_card = true;
  o.max_sequence_tokens = 64;
  CHECK(plan_pool("vattention", o).ok());
  o = good;
  o.shape.n_kv_heads = 1024;
  refuse(o, "less than one token");
}

TEST_CASE("vattention: rows come in runs, so that one mapping holds many", "[allocator][vattention]") {
  KvOptions o = options_of(KvOrder::token_major, 512, 8, 64 * 48);
  auto pool = make_block_pool("vattention", o).value();
  std::vector<std::vector<int32_t>> tables(8);
  // Eight sequences grow in turn, row by row.
  for (int i = 0; i < 48; ++i)
    for (auto& table : tables) REQUIRE(dynamic_cast<RowPool&>(*pool).allocate(1, table));
  int runs = 0;
  for (const auto& table : tables)
    for (size_t i = 0; i < table.size(); ++i) runs += i == 0 || table[i] != table[i - 1] + 1;
  CHECK(runs <= 8 * 48 / 16);
}

}  // namespace

}  // namespace xpyd::testing::vattention_test
