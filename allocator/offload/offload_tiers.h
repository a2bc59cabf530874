// OffloadTiers: the KV blocks that are kept below one instance's pool, in host memory and then on a disk. It knows
// which blocks it has and where, and which one is evicted when a tier is full. It copies between host and disk. Its
// caller (OffloadedMemory) copies between device and host.
//
// A block is `block_tokens` tokens of one sequence, from a multiple of block_tokens on, in all layers, in token_major.
// It is named, found and proved like a pool's block (prefix_index.h). Of two blocks with one hash only the later is
// known. Listeners are told which complete blocks the host has, and which the disk has. A block may be in both.
//
// Blocks form a forest. A block is not forgotten before the blocks that continue it, so that whatever is kept can be
// found. Only a failing disk breaks this rule: the blocks after a lost one can no longer be found, and stay until they
// are evicted.
//
// Host blocks are written to the disk in the background while less than a quarter of the host is free or clean. A clean
// block has a copy on the disk, so it can be given up at once. A block that is read from the disk is on the host,
// clean, until it is evicted there. After the first operation that fails, the disk is given up.
//
// Thread safety: every function locks for itself; the functions below `owner` belong to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "allocator/eviction.h"
#include "allocator/kv/kv_layout.h"
#include "allocator/offload/disk_file.h"
#include "allocator/offload_options.h"
#include "allocator/prefix/prefix_index.h"
#include "base/device/device.h"
#include "base/status.h"

namespace xpyd::allocator {

class OffloadTiers {
 public:
  // The end of a sequence's chain of blocks.
  struct Chain : PrefixChain {
    int n_blocks = 0;
  };
  // Faults that tests inject.
  struct Seams {
    DiskFault disk_fault;
    uint64_t key_mask = ~uint64_t{0};  // ANDed to each hash at look-up, to force collisions
  };

  // Errors name the option that cannot be met.
  static Result<std::unique_ptr<OffloadTiers>> create(const KvShape& shape, const OffloadOptions& options,
                                                      Device& device, Seams seams);
  ~OffloadTiers();

  const OffloadOptions& options() const { return options_; }
  int block_tokens() const { return options_.block_tokens; }
  // The layout of the host: its block ids are the slots below.
  const KvLayout& layout() const { return layout_; }
  std::byte* host() const { return host_.get(); }

  // Returns the blocks of the longest known prefix, at most max_blocks.
  int match(std::span<const int32_t> tokens, uint64_t salt, int max_blocks) const;
  void forget();  // drops every block that nobody uses

  // ---- owner
  void tick();  // starts a new moment of use; blocks used in one moment age from the deepest
  static Chain root(uint64_t salt) { return {{.hash = salt}}; }
  bool intact(const Chain& chain) const;  // the block at its end is still known
  // Returns the known block with these tokens after the chain, and advances the chain over it; -1: there is none.
  // `touch`: counts a use. `pin` (only with `touch`): also pins the block, because forget() may come between two calls.
  int32_t find(Chain& chain, const int32_t* tokens, bool touch = true, bool pin = false);
  // Makes a block with these tokens known, in a host slot to which the caller now copies it until stored(). The chain
  // advances. -1: no slot is available now. Requires: find() returns -1, and the chain is intact.
  int32_t add(Chain& chain, const int32_t* tokens);
  void touch(const Chain& chain);  // marks every block of the chain as used now
  void stored(int32_t block);

  // A pinned block keeps its bytes and its slot, unless a failed read loses it. It is not forgotten.
  void unpin(int32_t block);
  enum class Where { host, coming, waiting, lost };
  // Locates a pinned block. `coming`: a copy to the host is under way. `waiting`: it is only on the disk, and no host
  // slot is available now. The first call that finds it only on the disk starts the read and sets *from_disk.
  Where fetch(int32_t block, bool* from_disk);
  int slot(int32_t block) const;  // slot of the host

  void poll();          // takes ended disk operations; writes blocks behind
  bool moving() const;  // a store, a read or a write is under way

  // Adds to the counters that only the caller can count: f(OffloadStats&).
  template <class F>
  void count(F&& f) {
    std::lock_guard lock(mutex_);
    f(stats_);
  }

  OffloadStats stats() const;
  void check_invariants() const;
  std::vector<uint64_t> held(Tier tier) const;  // the blocks that listeners should know, for tests

 private:
  // Sets of blocks, each in its eviction order.
  enum Order : int {
    kClean,      // on the host and on the disk: the host can give it up at once
    kDirtyLeaf,  // on the host only, continued by none: evicting it loses it
    kDirty,      // on the host only, and no write under way
    kDiskLeaf,   // on the disk only, continued by none
    kOrders
  };
  using Place = std::tuple<EvictionRank, int, int32_t>;  // {rank, -position, block}
  struct Block {
    int32_t parent = -1;                 // the block before it, if that is still known (parent_of())
    uint64_t hash = 0, parent_hash = 0;  // parent_hash of a first block: the salt
    BlockUse use;
    int children = 0;  // known blocks that continue it
    int pins = 0;
    int host = -1, disk = -1;  // slots
    int disk_target = -1;      // the disk slot of a write under way
    bool storing = false, writing = false, reading = false, lost = false;
    uint64_t checksum = 0;
    bool clean = false;      // on the host and on the disk
    bool told[kTiers] = {};  // whether listeners know it
    bool in[kOrders] = {};
    Place place[kOrders];
    bool busy() const { return storing || writing || reading; }
  };

  OffloadTiers(const KvShape& shape, const OffloadOptions& options, Seams seams);
  uint64_t next_hash(const Chain& chain, const int32_t* tokens) const;
  void advance(Chain& chain, uint64_t hash, int32_t block) const {
    index_->advance(chain, hash, block), ++chain.n_blocks;
  }
  Block& at(int32_t block) { return blocks_[size_t(block)]; }
  const Block& at(int32_t block) const { return blocks_[size_t(block)]; }
  int32_t parent_of(int32_t block) const;  // -1: it is a first block, or its parent is not known any more
  bool is_in(int32_t block, Tier tier) const;
  bool disk_on() const { return disk_ && !disk_off_; }
  void refresh(int32_t block);
  void tell(int32_t block);
  void set_host(int32_t block, int slot);
  int32_t goes_first(Order order) const;
  int take_host_slot();
  int take_disk_slot();
  void drop_host(int32_t block);
  void remove(int32_t block);
  void write_behind();
  void ended(const DiskFile::Done& done);
  void drop_disk(int32_t block);

  const OffloadOptions options_;
  const Seams seams_;
  KvLayout layout_;
  std::shared_ptr<std::byte> host_;
  const EvictionPolicy* policy_;

  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  std::vector<int32_t> unused_;
  std::vector<PrefixCache::Node> nodes_;  // [n_host_slots + n_disk_slots]
  std::unique_ptr<PrefixIndex> index_;    // of the known blocks
  std::set<Place> orders_[kOrders];
  std::vector<int> free_host_, free_disk_;  // slots
  int disk_slots_ = 0;
  int64_t tick_ = 1;
  int storing_ = 0, writing_ = 0, reading_ = 0, clean_ = 0;  // blocks
  bool disk_off_ = false;                                    // an operation has failed
  OffloadStats stats_;
  std::vector<DiskFile::Done> done_;
  std::unique_ptr<DiskFile> disk_;  // last, so that its thread ends before its memory goes
};

}  // namespace xpyd::allocator
