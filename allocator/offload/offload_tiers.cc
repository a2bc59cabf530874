#include "allocator/offload/offload_tiers.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/memory.h"
#include "base/table.h"

namespace xpyd::allocator {
namespace {

constexpr int kHeadroom = 4;         // 1 / kHeadroom of the host is free or clean, if the disk keeps up
constexpr int kWritesUnderWay = 16;  // blocks

}  // namespace

OffloadTiers::OffloadTiers(const KvShape& shape, const OffloadOptions& options, Seams seams)
    : options_(options),
      seams_(std::move(seams)),
      layout_{shape, KvOrder::token_major, options.block_tokens, 0},
      policy_(find_row(kEvictionPolicies, options.eviction)) {}

OffloadTiers::~OffloadTiers() = default;

Result<std::unique_ptr<OffloadTiers>> OffloadTiers::create(const KvShape& shape, const OffloadOptions& options,
                                                           Device& device, Seams seams) try {
  if (!options.on())
    return invalid(options.disk_dir.empty()
                       ? "--host-kv-bytes is 0; offloading needs host memory"
                       : "--disk-kv-dir: needs --host-kv-bytes, because KV goes to the disk through host memory");
  XPYD_CHECK(options.block_tokens > 0);
  std::unique_ptr<OffloadTiers> t(new OffloadTiers(shape, options, std::move(seams)));
  const size_t block = t->layout_.block_bytes(), n = options.host_bytes / block;
  if (n < 1 || n > size_t(INT_MAX) / size_t(options.block_tokens))
    return invalid("--host-kv-bytes is " + std::to_string(options.host_bytes) + ": one block of " +
                   std::to_string(options.block_tokens) + " tokens has " + std::to_string(block) +
                   " bytes; expected room for at least one block and less than 2^31 tokens");
  need(check_available_memory(options.host_bytes), "--host-kv-bytes: ");  // whether or not it can be pinned
  t->layout_.n_blocks = int(n);
  t->host_ = need(device.allocate_host(t->layout_.pool_bytes()), "--host-kv-bytes: ");
  for (int slot = int(n); slot-- > 0;) t->free_host_.push_back(slot);
  if (!options.disk_dir.empty()) {
    if (block > size_t{1} << 30)
      return invalid("--disk-kv-dir: " + std::to_string(options.block_tokens) + " tokens have " +
                     std::to_string(block) + " bytes, more than one read can transfer");
    const size_t slots = std::min(options.disk_bytes / block, size_t(INT_MAX) / 2);
    if (slots < 1)
      return invalid("--disk-kv-bytes is " + std::to_string(options.disk_bytes) + ": one block takes " +
                     std::to_string(block) + " bytes");
    t->disk_ = need(DiskFile::open(options.disk_dir, block, int(slots), t->seams_.disk_fault));
    t->disk_slots_ = int(slots);
    for (int slot = int(slots); slot-- > 0;) t->free_disk_.push_back(slot);
  }
  t->nodes_.resize(n + size_t(t->disk_slots_));
  t->index_ = std::make_unique<PrefixIndex>(int(t->nodes_.size()), options.block_tokens, t->seams_.key_mask,
                                            options.block_tokens, t->nodes_.data(), sizeof t->nodes_[0]);
  return t;
} catch (const Error& error) {
  return error;
}

// ---- The index.

uint64_t OffloadTiers::next_hash(const Chain& chain, const int32_t* tokens) const {
  return prefix_hash(chain.hash, chain.first(), tokens, options_.block_tokens);
}

int32_t OffloadTiers::parent_of(int32_t block) const {
  const int32_t parent = at(block).parent;
  return parent >= 0 && index_->follows(block, parent) ? parent : -1;
}

int OffloadTiers::match(std::span<const int32_t> tokens, uint64_t salt, int max_blocks) const {
  const int64_t longest = std::min(int64_t(tokens.size()), int64_t(max_blocks) * options_.block_tokens);
  const auto locked = [this](const std::function<void()>& f) {
    std::lock_guard lock(mutex_);
    f();
  };
  PrefixChain chain{.hash = salt};
  return index_->match(tokens, int(longest), chain, locked, [](std::span<const int32_t>) {}) / options_.block_tokens;
}

void OffloadTiers::tick() {
  std::lock_guard lock(mutex_);
  ++tick_;
}

bool OffloadTiers::intact(const Chain& chain) const {
  std::lock_guard lock(mutex_);
  return index_->intact(chain);
}

int32_t OffloadTiers::find(Chain& chain, const int32_t* tokens, bool touch, bool pin) {
  const uint64_t hash = next_hash(chain, tokens);
  std::lock_guard lock(mutex_);
  const int32_t block = index_->find(chain, hash, tokens);
  if (block < 0) return -1;
  if (touch) {
    Block& b = at(block);
    b.use.last_use = tick_;
    ++b.use.uses;
    b.pins += pin;
    refresh(block);
  }
  advance(chain, hash, block);
  return block;
}

int32_t OffloadTiers::add(Chain& chain, const int32_t* tokens) {
  const uint64_t hash = next_hash(chain, tokens);
  std::lock_guard lock(mutex_);
  // Another block has this hash: of another prefix (a collision), or of a prefix that is not known any more.
  if (const int32_t other = index_->find_key(hash); other >= 0) {
    if (at(other).busy() || at(other).pins > 0 || other == chain.block) return -1;
    remove(other);
  }
  if (!index_->intact(chain)) return -1;  // remove() has just dropped its end
  if (chain.block >= 0) {
    ++at(chain.block).pins;  // a parent is not evicted for its child
    refresh(chain.block);
  }
  const int slot = take_host_slot();
  if (chain.block >= 0) {
    --at(chain.block).pins;
    refresh(chain.block);
  }
  if (slot < 0) return -1;
  int32_t block = int32_t(blocks_.size());
  if (unused_.empty() && blocks_.size() == nodes_.size()) {  // some lost blocks are still pinned
    free_host_.push_back(slot);
    return -1;
  }
  if (unused_.empty()) {
    blocks_.emplace_back();
  } else {
    block = unused_.back();
    unused_.pop_back();
  }
  Block& b = at(block);
  b = Block{};
  b.parent = chain.block;
  b.hash = hash;
  b.parent_hash = chain.hash;
  b.use = {tick_, 1, chain.n_blocks, tick_};
  b.storing = true;
  index_->insert(chain, hash, tokens, block);
  ++storing_;
  if (b.parent >= 0) {
    ++at(b.parent).children;
    refresh(b.parent);
  }
  set_host(block, slot);
  advance(chain, hash, block);
  write_behind();
  return block;
}

void OffloadTiers::touch(const Chain& chain) {
  std::lock_guard lock(mutex_);
  for (int32_t block = index_->intact(chain) ? chain.block : -1; block >= 0; block = parent_of(block)) {
    at(block).use.last_use = tick_;
    refresh(block);
  }
}

void OffloadTiers::stored(int32_t block) {
  std::lock_guard lock(mutex_);
  at(block).storing = false;
  --storing_;
  refresh(block);
}

// ---- Readers.

void OffloadTiers::unpin(int32_t block) {
  std::lock_guard lock(mutex_);
  Block& b = at(block);
  XPYD_CHECK(b.pins > 0);
  --b.pins;
  if (b.lost) {
    if (b.pins == 0) unused_.push_back(block);
    return;
  }
  refresh(block);
}

OffloadTiers::Where OffloadTiers::fetch(int32_t block, bool* from_disk) {
  std::lock_guard lock(mutex_);
  Block& b = at(block);
  XPYD_CHECK(b.pins > 0);
  if (b.lost) return Where::lost;
  if (b.host >= 0) return b.storing || b.reading ? Where::coming : Where::host;
  const int slot = take_host_slot();
  if (slot < 0) return Where::waiting;
  *from_disk = true;
  b.reading = true;
  ++reading_;
  b.use.entered = tick_;
  set_host(block, slot);
  disk_->read(b.disk, host_.get() + layout_.offset(slot, 0, 0, 0, 0), b.checksum, block);
  return Where::coming;
}

int OffloadTiers::slot(int32_t block) const {
  std::lock_guard lock(mutex_);
  return at(block).host;
}

// ---- Eviction.

// After any change of a block: updates its eviction orders, and tells listeners.
void OffloadTiers::refresh(int32_t block) {
  Block& b = at(block);
  const bool known = index_->contains(block), idle = known && !b.busy() && b.pins == 0;
  const bool on_host = b.host >= 0, on_disk = b.disk >= 0;
  const bool belongs[kOrders] = {
      idle && on_host && on_disk,
      idle && on_host && !on_disk && b.children == 0,
      known && !b.busy() && on_host && !on_disk,
      idle && !on_host && on_disk && b.children == 0,
  };
  for (int order = 0; order < kOrders; ++order) {
    if (b.in[order]) orders_[order].erase(b.place[order]);
    b.in[order] = belongs[order];
    if (!belongs[order]) continue;
    b.place[order] = {policy_->rank(b.use), -b.use.position, block};
    orders_[order].insert(b.place[order]);
  }
  clean_ -= int(b.clean);
  b.clean = known && on_host && on_disk && !b.reading;
  clean_ += int(b.clean);
  if (!options_.listeners.empty()) tell(block);
}

bool OffloadTiers::is_in(int32_t block, Tier tier) const {
  const Block& b = at(block);
  return index_->contains(block) && (tier == Tier::host ? b.host >= 0 && !b.storing && !b.reading : b.disk >= 0);
}

void OffloadTiers::tell(int32_t block) {
  Block& b = at(block);
  for (const Tier tier : {Tier::host, Tier::disk}) {
    const bool there = is_in(block, tier);
    if (std::exchange(b.told[int(tier)], there) == there) continue;
    const std::optional<uint64_t> parent = b.parent < 0 ? std::nullopt : std::optional(b.parent_hash);
    for (const auto& listener : options_.listeners)
      there ? listener->stored(tier, b.hash, parent, {index_->tokens_of(block), size_t(options_.block_tokens)})
            : listener->removed(tier, b.hash);
  }
}

void OffloadTiers::set_host(int32_t block, int slot) {
  at(block).host = slot;
  refresh(block);
}

int32_t OffloadTiers::goes_first(Order order) const {
  constexpr size_t kShown = 8;
  const std::set<Place>& places = orders_[order];
  if (options_.evicts) {
    std::vector<BlockUse> first;
    for (auto place = places.begin(); place != places.end() && first.size() < kShown; ++place)
      first.push_back(at(std::get<2>(*place)).use);
    options_.evicts(*policy_, first);
  }
  return std::get<2>(*places.begin());
}

int OffloadTiers::take_host_slot() {
  if (free_host_.empty()) {
    if (!orders_[kClean].empty()) {
      drop_host(goes_first(kClean));
      ++stats_.host_evictions;
    } else if (!orders_[kDirtyLeaf].empty() && (!disk_on() || writing_ == 0)) {
      remove(goes_first(kDirtyLeaf));
      ++stats_.host_evictions;
    } else {
      return -1;
    }
  }
  const int slot = free_host_.back();
  free_host_.pop_back();
  return slot;
}

void OffloadTiers::drop_host(int32_t block) {
  free_host_.push_back(at(block).host);
  if (at(block).disk >= 0) at(block).use.entered = tick_;
  set_host(block, -1);
}

// Forgets a block. Its readers find it lost, and blocks that continue it can no longer be found.
void OffloadTiers::remove(int32_t block) {
  Block& b = at(block);
  XPYD_CHECK(index_->contains(block) && !b.busy());
  if (b.host >= 0) drop_host(block);
  if (b.disk >= 0) free_disk_.push_back(std::exchange(b.disk, -1));
  if (const int32_t parent = parent_of(block); parent >= 0) {
    --at(parent).children;
    refresh(parent);
  }
  index_->evict(block);
  refresh(block);
  if (b.pins > 0) {
    b.lost = true;
  } else {
    unused_.push_back(block);
  }
}

void OffloadTiers::forget() {
  std::lock_guard lock(mutex_);
  for (bool more = true; more;) {
    more = false;
    while (!orders_[kClean].empty()) {
      drop_host(std::get<2>(*orders_[kClean].begin()));
      more = true;
    }
    for (Order order : {kDirtyLeaf, kDiskLeaf})
      while (!orders_[order].empty()) {
        remove(std::get<2>(*orders_[order].begin()));
        more = true;
      }
  }
}

// ---- Between host and disk: write-behind, ended operations, and the cost of a failing disk.

int OffloadTiers::take_disk_slot() {
  if (free_disk_.empty()) {
    if (orders_[kDiskLeaf].empty()) return -1;
    remove(goes_first(kDiskLeaf));
    ++stats_.disk_evictions;
  }
  const int slot = free_disk_.back();
  free_disk_.pop_back();
  return slot;
}

void OffloadTiers::poll() {
  if (!disk_) return;
  std::lock_guard lock(mutex_);
  done_.clear();
  disk_->take(done_);
  for (const DiskFile::Done& done : done_) ended(done);
  write_behind();
}

void OffloadTiers::write_behind() {
  const int capacity = layout_.n_blocks;
  while (disk_on() && writing_ < kWritesUnderWay && !orders_[kDirty].empty() &&
         (int(free_host_.size()) + clean_ + writing_) * kHeadroom < capacity) {
    const int slot = take_disk_slot();
    if (slot < 0) return;
    const int32_t block = std::get<2>(*orders_[kDirty].begin());
    Block& b = at(block);
    b.writing = true;
    b.disk_target = slot;
    ++writing_;
    refresh(block);
    disk_->write(slot, host_.get() + layout_.offset(b.host, 0, 0, 0, 0), block);
  }
}

void OffloadTiers::ended(const DiskFile::Done& done) {
  const int32_t block = int32_t(done.id);
  Block& b = at(block);
  const bool good = done.error.empty();
  const int64_t bytes = int64_t(layout_.block_bytes());
  if (done.write) {
    b.writing = false;
    --writing_;
    b.disk = std::exchange(b.disk_target, -1);
    b.checksum = done.checksum;
    good ? stats_.disk_bytes_written += bytes : ++stats_.failed_writes;
  } else {
    b.reading = false;
    --reading_;
    good ? stats_.disk_bytes_read += bytes : ++stats_.failed_reads;
    if (!good) drop_host(block);
  }
  if (!good && !disk_off_) {
    log_line(LogLevel::error, "xpyd: --disk-kv-dir %s: a %s failed: %s; from now on the disk is not used",
             options_.disk_dir.c_str(), done.write ? "write" : "read", done.error.c_str());
    disk_off_ = true;
    for (int32_t other = 0; other < int32_t(blocks_.size()); ++other) drop_disk(other);
  }
  if (disk_off_) drop_disk(block);
  refresh(block);
}

// Gives up the disk's copy of a block, and the block if the host has none.
void OffloadTiers::drop_disk(int32_t block) {
  Block& b = at(block);
  if (!index_->contains(block) || b.disk < 0 || b.busy()) return;
  if (b.host < 0) return remove(block);
  free_disk_.push_back(std::exchange(b.disk, -1));
  refresh(block);
}

// ---- Counters.

bool OffloadTiers::moving() const {
  std::lock_guard lock(mutex_);
  return storing_ + writing_ + reading_ > 0;
}

OffloadStats OffloadTiers::stats() const {
  std::lock_guard lock(mutex_);
  OffloadStats s = stats_;
  s.host_capacity = layout_.n_blocks;
  s.host_blocks = layout_.n_blocks - int64_t(free_host_.size());
  s.disk_capacity = disk_slots_;
  s.disk_blocks = disk_slots_ - int64_t(free_disk_.size());
  return s;
}

std::vector<uint64_t> OffloadTiers::held(Tier tier) const {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> hashes;
  for (int32_t block = 0; block < int32_t(blocks_.size()); ++block)
    if (is_in(block, tier)) hashes.push_back(at(block).hash);
  return hashes;
}

void OffloadTiers::check_invariants() const {
  std::lock_guard lock(mutex_);
  std::vector<int> hosts(size_t(layout_.n_blocks), 0), disks(size_t(disk_slots_), 0);
  std::vector<int> children(blocks_.size(), 0);
  for (int slot : free_host_) ++hosts[size_t(slot)];
  for (int slot : free_disk_) ++disks[size_t(slot)];
  size_t known = 0, standing[kOrders] = {};
  int storing = 0, writing = 0, reading = 0, clean = 0;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& b = blocks_[i];
    if (!index_->contains(int32_t(i))) {
      XPYD_CHECK(b.host < 0 && b.disk < 0 && !b.busy());
      for (bool in : b.in) XPYD_CHECK(!in);
      continue;
    }
    ++known;
    XPYD_CHECK(index_->find_key(b.hash) == int32_t(i));
    XPYD_CHECK(b.host >= 0 || b.disk >= 0);
    XPYD_CHECK(!b.writing || (b.host >= 0 && b.disk < 0 && b.disk_target >= 0));
    if (b.host >= 0) ++hosts[size_t(b.host)];
    if (b.disk >= 0) ++disks[size_t(b.disk)];
    if (b.disk_target >= 0) ++disks[size_t(b.disk_target)];
    if (const int32_t parent = parent_of(int32_t(i)); parent >= 0) ++children[size_t(parent)];
    storing += b.storing, writing += b.writing, reading += b.reading, clean += b.clean;
    const bool idle = !b.busy() && b.pins == 0;
    XPYD_CHECK(b.clean == (b.host >= 0 && b.disk >= 0 && !b.reading));
    XPYD_CHECK(b.in[kClean] == (idle && b.host >= 0 && b.disk >= 0));
    XPYD_CHECK(b.in[kDirtyLeaf] == (idle && b.host >= 0 && b.disk < 0 && b.children == 0));
    XPYD_CHECK(b.in[kDiskLeaf] == (idle && b.host < 0 && b.children == 0));
    for (int order = 0; order < kOrders; ++order) {
      standing[order] += b.in[order];
      if (b.in[order]) XPYD_CHECK(orders_[order].count(b.place[order]) == 1);
    }
  }
  for (size_t i = 0; i < blocks_.size(); ++i)
    if (index_->contains(int32_t(i))) XPYD_CHECK(children[i] == blocks_[i].children);
  for (int n : hosts) XPYD_CHECK(n == 1, "a host slot is used " + std::to_string(n) + " times");
  for (int n : disks) XPYD_CHECK(n == 1, "a disk slot is used " + std::to_string(n) + " times");
  for (int order = 0; order < kOrders; ++order) XPYD_CHECK(orders_[order].size() == standing[order]);
  XPYD_CHECK(index_->size() == int(known));
  index_->check_invariants();
  XPYD_CHECK(storing == storing_ && writing == writing_ && reading == reading_ && clean == clean_);
}

}  // namespace xpyd::allocator
