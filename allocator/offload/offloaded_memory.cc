#include "allocator/offload/offloaded_memory.h"

#include <algorithm>
#include <utility>

#include "allocator/kv/kv_copy.h"
#include "allocator/kv/kv_shards.h"

namespace xpyd::allocator {
namespace {

constexpr size_t kPieceBytes = 8 << 20;  // of one copy in; each piece that arrives makes room for the next
constexpr size_t kCached = 1 << 20;      // of one copy in; a larger one bypasses the caches
constexpr size_t kReadAhead = 64;        // blocks that one sequence reads ahead from the disk

constexpr double kLookAgain = 20e-6;  // seconds

// The number of blocks whose copy out may be under way: half of the pool.
size_t out_budget(const KvStats& pool, int block_tokens) {
  const int64_t tokens = int64_t(pool.capacity) * pool.block_tokens;
  return size_t(std::max<int64_t>(16, tokens / block_tokens / 2));
}

Clock& machine_clock() {
  static RealClock clock;
  return clock;
}

}  // namespace

Result<std::unique_ptr<KvMemory>> make_offloaded(std::unique_ptr<KvMemory> memory, const KvOptions& options) {
  Device& device = options.device ? *options.device : cpu_device();
  auto tiers = OffloadTiers::create(options.shape, options.tiers, device, {});
  if (!tiers) return tiers.error();
  return std::unique_ptr<KvMemory>(std::make_unique<OffloadedMemory>(
      std::move(memory), std::move(tiers).value(), device, options.clock ? *options.clock : machine_clock()));
}

OffloadedMemory::OffloadedMemory(std::unique_ptr<KvMemory> memory, std::unique_ptr<OffloadTiers> tiers, Device& device,
                                 Clock& clock)
    : KvMemory(memory->name(), memory->places(), {memory->leases(), *this, this, this}),
      memory_(std::move(memory)),
      tiers_(std::move(tiers)),
      block_tokens_(tiers_->block_tokens()),
      out_budget_(out_budget(memory_->stats(), block_tokens_)),
      out_(device.make_copy_queue(tiers_->options().copy_gbps)),
      in_(device.make_copy_queue(tiers_->options().copy_gbps)),
      clock_(clock) {}

OffloadedMemory::~OffloadedMemory() {
  for (KvHandle handle : loading_) {
    sequences_[size_t(handle)].load.cut = true;
    sequences_[size_t(handle)].given_up = true;
  }
  out_->wait();
  in_->wait();
  poll_out();
  poll_in();
}

// ---- Sequences.

OffloadedMemory::Sequence& OffloadedMemory::start(KvHandle handle, std::span<const int32_t> tokens, uint64_t salt) {
  if (size_t(handle) >= sequences_.size()) sequences_.resize(size_t(handle) + 1);
  Sequence& s = sequences_[size_t(handle)];
  XPYD_CHECK(!s.loading);
  s.given_up = false;
  s.kept_up = true;
  s.behind = false;
  s.tokens.assign(tokens.begin(), tokens.end());
  s.salt = salt;
  s.chain = OffloadTiers::root(salt);
  return s;
}

Result<KvReservation> OffloadedMemory::reserve(std::span<const int32_t> tokens, uint64_t salt) {
  Result<KvReservation> reserved = memory_->reserve(tokens, salt);
  if (!reserved) return reserved;
  KvReservation r = reserved.value();
  start(r.handle, tokens.first(size_t(r.cached_tokens)), salt);
  begin_load(r.handle, r, tokens, salt);
  return r;
}

int OffloadedMemory::matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const {
  const int here = memory_->probe(tokens, salt);
  const int longest = tokens.empty() ? 0 : int(tokens.size() - 1) / block_tokens_;
  return std::max(here, tiers_->match(tokens, salt, longest) * block_tokens_);
}

bool OffloadedMemory::append(KvHandle handle, int n_tokens) {
  XPYD_CHECK(!sequences_[size_t(handle)].loading);
  return memory_->append(handle, n_tokens);
}

bool OffloadedMemory::reserve_blocks(KvHandle handle, int n_tokens) {
  XPYD_CHECK(!sequences_[size_t(handle)].loading);
  return memory_->reserve_blocks(handle, n_tokens);
}

void OffloadedMemory::commit(KvHandle handle, std::span<const int32_t> tokens) {
  Sequence& s = sequences_[size_t(handle)];
  XPYD_CHECK(!s.loading);
  memory_->commit(handle, tokens);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  if (int(s.tokens.size()) / block_tokens_ > s.chain.n_blocks) {
    poll_out();
    store(handle);
  }
}

void OffloadedMemory::rollback(KvHandle handle) {
  XPYD_CHECK(!sequences_[size_t(handle)].loading);
  memory_->rollback(handle);
}

Result<KvHandle> OffloadedMemory::fork(KvHandle handle) {
  XPYD_CHECK(!sequences_[size_t(handle)].loading);
  Result<KvHandle> child = memory_->fork(handle);
  if (!child) return child;
  if (size_t(child.value()) >= sequences_.size()) sequences_.resize(size_t(child.value()) + 1);
  const Sequence& s = sequences_[size_t(handle)];
  Sequence& own = start(child.value(), s.tokens, s.salt);
  own.chain = s.chain;
  own.kept_up = s.kept_up;
  return child;
}

void OffloadedMemory::free(KvHandle handle) {
  Sequence& s = sequences_[size_t(handle)];
  if (s.loading) {
    s.given_up = s.load.cut = true;
    poll_in();
    return;
  }
  leave(handle);
  memory_->free(handle);
}

KvHandover OffloadedMemory::hand_over(KvHandle handle) {
  XPYD_CHECK(!sequences_[size_t(handle)].loading);
  leave(handle);
  poll_out();
  return memory_->handoff().hand_over(handle);
}

KvHandle OffloadedMemory::adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) {
  const size_t n = size_t(handover.tokens);
  const KvHandle handle = memory_->handoff().adopt(std::move(handover), tokens, salt);
  if (handle == kNoKv) return handle;
  start(handle, tokens.first(n), salt);
  poll_out();
  store(handle);
  return handle;
}

// Ends a sequence in the tiers. Blocks that they have not taken are dropped. The others count as used until now.
void OffloadedMemory::leave(KvHandle handle) {
  Sequence& s = sequences_[size_t(handle)];
  if (std::exchange(s.behind, false)) std::erase(behind_, handle);
  tiers_->tick();
  tiers_->touch(s.chain);
  const int missing = int(s.tokens.size()) / block_tokens_ - s.chain.n_blocks;
  if (missing > 0) tiers_->count([&](OffloadStats& stats) { stats.dropped_out += missing; });
  s.tokens.clear();
}

// Sets copies_ to the copies of a sequence's tokens to the host or from it, and returns their bytes. A tier keeps whole
// tokens in the model's shape, so KV from some ranks can go back to others. Of ranks with the same heads, the first is
// read, and all are written.
size_t OffloadedMemory::plan_copies(KvHandle handle, const KvView& host, int token_begin, int token_end, bool out) {
  copies_.clear();
  const KvShape& whole = host.layout->shape;
  const KvShards one{.n_layers = whole.n_layers, .n_kv_heads = whole.n_kv_heads};
  const KvShards& shards = memory_->shards() ? *memory_->shards() : one;
  size_t bytes = 0;
  for (int rank = 0; rank < shards.n_ranks(); ++rank) {
    if (out && shards.tensor_rank_of(rank) % shards.replicas() != 0) continue;
    const KvView view = memory_->view(handle, rank);
    // The rank's rectangle in the model's numbers and in its own.
    KvRect in_model = shards.rect(rank), on_rank = in_model;
    on_rank.heads = {0, in_model.heads.size()};
    on_rank.layers = {0, in_model.layers.size()};
    const KvRect from = out ? on_rank : in_model, to = out ? in_model : on_rank;
    const KvRegion region{.token_begin = token_begin,
                          .token_end = token_end,
                          .layer_begin = from.layers.begin,
                          .layer_end = from.layers.end,
                          .head_begin = from.heads.begin,
                          .head_end = from.heads.end,
                          .to_layer = to.layers.begin,
                          .to_head = to.heads.begin};
    bytes += out ? add_copies(view, host, region, copies_) : add_copies(host, view, region, copies_);
  }
  return bytes;
}

// ---- Out.

void OffloadedMemory::store(KvHandle handle) {
  Sequence& s = sequences_[size_t(handle)];
  const int full = int(s.tokens.size()) / block_tokens_;
  // A sequence stops storing once its last block is not known any more: going on would evict others' blocks in turn.
  if (!s.kept_up || s.chain.n_blocks >= full) return;
  if (!tiers_->intact(s.chain)) {
    s.kept_up = false;
    return;
  }
  tiers_->tick();
  Out out;
  int first = -1;
  while (s.chain.n_blocks < full) {
    const int block = s.chain.n_blocks;
    const int32_t* tokens = &s.tokens[size_t(block) * size_t(block_tokens_)];
    if (first < 0 && tiers_->find(s.chain, tokens) >= 0) continue;
    if (blocks_out_ + out.blocks.size() >= out_budget_) break;
    const int32_t added = tiers_->add(s.chain, tokens);
    if (added < 0) break;
    if (first < 0) {
      first = block;
      table_.assign(size_t(full), 0);
    }
    table_[size_t(block)] = tiers_->slot(added);
    out.blocks.push_back(added);
  }
  if (s.chain.n_blocks < full && !std::exchange(s.behind, true)) behind_.push_back(handle);
  if (first < 0) return;
  const KvView host{tiers_->host(), &tiers_->layout(), table_.data(), 0};
  out.lease = memory_->pin(handle, first * block_tokens_, s.chain.n_blocks * block_tokens_);
  const size_t bytes = plan_copies(handle, host, first * block_tokens_, s.chain.n_blocks * block_tokens_, true);
  out.bytes = int64_t(bytes);
  out.start_s = clock_.now();
  out_->copy(copies_, false);
  out.mark = out_->mark();
  blocks_out_ += out.blocks.size();
  tiers_->count(
      [&](OffloadStats& stats) { stats.bytes_out += int64_t(bytes), stats.copies_out += int64_t(copies_.size()); });
  outs_.push_back(std::move(out));
}

void OffloadedMemory::poll_out() {
  StoredBlocks found;
  while (!outs_.empty() && out_->reached(outs_.front().mark)) {
    const Out& out = outs_.front();
    if (found.blocks == 0) found.begin_s = std::max(out.start_s, found_out_s_);
    found.blocks += int(out.blocks.size());
    found.bytes += out.bytes;
    for (int32_t block : out.blocks) tiers_->stored(block);
    memory_->unpin(out.lease);
    blocks_out_ -= out.blocks.size();
    outs_.pop_front();
  }
  if (found.blocks == 0) return;
  found.end_s = found_out_s_ = clock_.now();
  tiers_->count([&](OffloadStats& stats) { stats.store_seconds += found.end_s - found.begin_s; });
  if (tiers_->options().stores) tiers_->options().stores(found);
  if (behind_.empty()) return;
  // There is room again for blocks that the tiers could not take.
  again_.swap(behind_);
  for (KvHandle handle : again_)
    if (std::exchange(sequences_[size_t(handle)].behind, false)) store(handle);
  again_.clear();
}

// ---- In.

// Starts a load. False: there is nothing to load, or no room for it, and the reservation stays as it was.
bool OffloadedMemory::begin_load(KvHandle handle, KvReservation& reservation, std::span<const int32_t> tokens,
                                 uint64_t salt) {
  const int longest = tokens.empty() ? 0 : int(tokens.size() - 1) / block_tokens_;
  if (longest * block_tokens_ <= reservation.cached_tokens) return false;
  Sequence& s = sequences_[size_t(handle)];
  Load& load = s.load;
  load = Load{};
  load.begin = reservation.cached_tokens;
  load.first_block = load.begin / block_tokens_;
  OffloadTiers::Chain chain = OffloadTiers::root(salt);
  tiers_->tick();
  while (chain.n_blocks < longest) {
    const int block = chain.n_blocks;
    const int32_t* own = &tokens[size_t(block) * size_t(block_tokens_)];
    const bool here = block < load.first_block;
    const int32_t found = tiers_->find(chain, own, true, /*pin=*/!here);
    if (found < 0) break;
    if (here) {
      s.chain = chain;
    } else {
      load.blocks.push_back(found);
    }
  }
  const int end = chain.n_blocks * block_tokens_;
  if (end <= load.begin || !memory_->append(handle, end - load.begin)) {
    for (int32_t block : load.blocks) tiers_->unpin(block);
    return false;
  }
  load.from_disk.resize(load.blocks.size());
  s.tokens.assign(tokens.begin(), tokens.begin() + end);
  load.start_s = clock_.now();
  s.loading = true;
  reservation.loading = true;
  reservation.cached_tokens = end;
  loading_.push_back(handle);
  advance(handle);
  return true;
}

bool OffloadedMemory::ready(KvHandle handle) {
  poll();
  return !sequences_[size_t(handle)].loading;
}

bool OffloadedMemory::poll() {
  const bool under_way = copying();
  tiers_->poll();
  poll_out();
  poll_in();
  return under_way || tiers_->moving();
}

void OffloadedMemory::poll_in() {
  for (size_t i = 0; i < loading_.size(); ++i) advance(loading_[i]);
  const size_t ended = std::erase_if(loading_, [&](KvHandle handle) {
    const Load& load = sequences_[size_t(handle)].load;
    const bool done = load.pieces.empty() && (load.cut || load.copied == load.blocks.size());
    if (done) finish_load(handle);
    return done;
  });
  if (loading_.empty() || ended > 0 || tiers_->moving()) return;
  // Sequences that wait for another host slot hold all of them: the youngest stops loading and keeps what it has.
  const bool waits = std::all_of(loading_.begin(), loading_.end(),
                                 [&](KvHandle handle) { return sequences_[size_t(handle)].load.pieces.empty(); });
  if (Load& load = sequences_[size_t(loading_.back())].load; waits) cut(load, load.copied);
}

// Takes the ended copies of a load, and starts the next ones.
void OffloadedMemory::advance(KvHandle handle) {
  Load& load = sequences_[size_t(handle)].load;
  while (!load.pieces.empty() && in_->reached(load.pieces.front().mark)) {
    for (size_t n = load.pieces.front().n_blocks; n > 0; --n) tiers_->unpin(load.blocks[load.arrived++]);
    load.pieces.pop_front();
  }
  while (!load.cut && load.copied < load.blocks.size() && copy_in(handle)) {
  }
}

// Gives up the load's blocks from the n-th on.
void OffloadedMemory::cut(Load& load, size_t n) {
  for (size_t i = n; i < load.blocks.size(); ++i) tiers_->unpin(load.blocks[i]);
  load.blocks.resize(n);
  load.on_host = std::min(load.on_host, n);
  load.cut = true;
}

// Starts the copy of the next blocks that are on the host. False: there are none.
bool OffloadedMemory::copy_in(KvHandle handle) {
  Load& load = sequences_[size_t(handle)].load;
  for (size_t i = load.on_host; i < load.blocks.size() && i < load.on_host + kReadAhead; ++i) {
    bool from_disk = false;
    const OffloadTiers::Where where = tiers_->fetch(load.blocks[i], &from_disk);
    if (from_disk) load.from_disk[i] = true;
    if (where == OffloadTiers::Where::lost) {
      cut(load, i);
      break;
    }
    if (where == OffloadTiers::Where::host && i == load.on_host) ++load.on_host;
    if (where == OffloadTiers::Where::waiting) break;
  }
  if (load.on_host == load.copied) return false;
  const size_t most = std::max<size_t>(1, kPieceBytes / tiers_->layout().block_bytes());
  const size_t end = std::min(load.on_host, load.copied + most);
  const int begin_token = std::max(load.begin, (load.first_block + int(load.copied)) * block_tokens_);
  const int end_token = (load.first_block + int(end)) * block_tokens_;
  table_.assign(size_t(load.first_block) + end, 0);
  for (size_t i = load.copied; i < end; ++i) table_[size_t(load.first_block) + i] = tiers_->slot(load.blocks[i]);
  const KvView host{tiers_->host(), &tiers_->layout(), table_.data(), 0};
  const size_t bytes = plan_copies(handle, host, begin_token, end_token, false);
  in_->copy(copies_, bytes <= kCached);
  tiers_->count(
      [&](OffloadStats& stats) { stats.bytes_in += int64_t(bytes), stats.copies_in += int64_t(copies_.size()); });
  load.pieces.push_back({in_->mark(), end - load.copied});
  load.copied = end;
  return true;
}

// Ends a load. Requires: every started copy into the sequence has ended.
void OffloadedMemory::finish_load(KvHandle handle) {
  Sequence& s = sequences_[size_t(handle)];
  Load& load = s.load;
  s.loading = false;
  for (size_t i = load.arrived; i < load.blocks.size(); ++i) tiers_->unpin(load.blocks[i]);
  const double waited_s = clock_.now() - load.start_s;
  tiers_->count([&](OffloadStats& stats) { stats.load_wait_seconds += waited_s; });
  if (s.given_up) {
    s.tokens.clear();
    memory_->free(handle);
    return;
  }
  const auto end_of = [&](size_t n) { return std::max(load.begin, (load.first_block + int(n)) * block_tokens_); };
  int64_t hits[2] = {};  // tokens from the host, tokens from the disk
  for (size_t i = 0; i < load.arrived; ++i) hits[load.from_disk[i]] += end_of(i + 1) - end_of(i);
  tiers_->count([&](OffloadStats& stats) { stats.host_hit_tokens += hits[0], stats.disk_hit_tokens += hits[1]; });
  const int end = end_of(load.arrived);
  s.tokens.resize(size_t(end));
  memory_->commit(handle, std::span(s.tokens).subspan(size_t(load.begin)));
  if (load.cut) memory_->rollback(handle);
  // The loaded blocks are in the tiers, so storing continues after them.
  while (s.chain.n_blocks < end / block_tokens_) {
    const int32_t* own = &s.tokens[size_t(s.chain.n_blocks) * size_t(block_tokens_)];
    if (tiers_->find(s.chain, own, false) < 0) break;
  }
}

// ---- The whole memory.

void OffloadedMemory::drain() {
  while (poll()) clock_.sleep(kLookAgain);
}

KvStats OffloadedMemory::stats() const {
  KvStats stats = memory_->stats();
  stats.tiers = tiers_->stats();
  return stats;
}

void OffloadedMemory::clear_prefix_cache() {
  memory_->clear_prefix_cache();
  tiers_->forget();
}

void OffloadedMemory::check_invariants(bool complete) const {
  memory_->check_invariants(complete);
  tiers_->check_invariants();
  size_t out = 0;
  for (const Out& o : outs_) out += o.blocks.size();
  XPYD_CHECK(out == blocks_out_);
  size_t loading = 0;
  for (const Sequence& s : sequences_) loading += s.loading;
  XPYD_CHECK(loading == loading_.size());
  for (KvHandle handle : loading_) {
    const Load& load = sequences_[size_t(handle)].load;
    XPYD_CHECK(sequences_[size_t(handle)].loading);
    size_t under_way = 0;
    for (const Load::Piece& piece : load.pieces) under_way += piece.n_blocks;
    XPYD_CHECK(under_way == load.copied - load.arrived && load.copied <= load.blocks.size());
  }
}

}  // namespace xpyd::allocator
