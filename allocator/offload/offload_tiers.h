// OffloadTiers: the KV blocks that are kept below one instance's pool: in host memory, then on a disk.
// It knows which blocks there are, where, and who goes when a tier is full; copies between device
// and host are its caller's (OffloadedMemory), those between host and disk its own.
//
// A block is `block_tokens` tokens of one sequence from a multiple of block_tokens on, all layers,
// in token_major. It is named, found and proved as a pool's are (prefix_index.h); of two blocks of one hash one is
// known, the later.
// Listeners are told what the host has, whole, and what the disk has; a block may be in both.
//
// Blocks form a forest. A block that others continue is not forgotten before them, so that what is kept can be found;
// only a failed read breaks that, and leaves blocks that nobody finds, until they are evicted.
//
// Host blocks are written to the disk in the background while less than a quarter of the host is
// free or has its copy on the disk: such "clean" blocks can be given up at once. A block that is
// read from the disk is on the host, clean, until it is evicted there. So much is clean that the watermarks (relieve())
// find enough to give up: a quarter is more than what they want free.
//
// Thread safety: every function locks for itself; those marked `owner` belong to one thread.
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
  // What tests put in.
  struct Seams {
    DiskFault disk_fault;
    DiskRefusal disk_refusal;
    uint64_t key_mask = ~uint64_t{0};  // ANDed to each hash where it is looked up: collisions
  };

  // The errors name the option that cannot be met.
  static Result<std::unique_ptr<OffloadTiers>> create(const KvShape& shape, const OffloadOptions& options,
                                                      Device& device, Seams seams);
  ~OffloadTiers();

  const OffloadOptions& options() const { return options_; }
  int block_tokens() const { return options_.block_tokens; }
  // Of the host: block ids of this layout are the slots below.
  const KvLayout& layout() const { return layout_; }
  std::byte* host() const { return host_.get(); }

  // Blocks of the longest known prefix, at most max_blocks.
  int match(std::span<const int32_t> tokens, uint64_t salt, int max_blocks) const;
  void forget();  // everything that nobody uses

  // ---- owner
  void tick();  // a new moment in the order of uses: blocks used in one moment age from the deepest
  static Chain root(uint64_t salt) { return {{.hash = salt}}; }
  bool intact(const Chain& chain) const;  // the block at its end is still known
  // The known block with these tokens after the chain, which advances over it; -1: there is none.
  // `pin`: pins it, too, since forget() may come between two calls; only with `touch`.
  int32_t find(Chain& chain, const int32_t* tokens, bool touch = true, bool pin = false);
  // Makes it known, with a slot of the host that the caller now copies it to, until stored(); the
  // chain advances. -1: no slot can be had now. Before: find() is -1, the chain is intact.
  int32_t add(Chain& chain, const int32_t* tokens);
  void touch(const Chain& chain);  // every block of it has been used now
  void stored(int32_t block);

  // A pinned block keeps its bytes, or is lost by a failed read; it is neither forgotten nor moved to another slot.
  void unpin(int32_t block);
  enum class Where { host, coming, waiting, lost };
  // Of a pinned block. `coming`: a copy to the host is under way, its or another's. `waiting`: it is on the disk only
  // and no slot of the host can be had now. The first call that finds it on the disk begins the read.
  Where fetch(int32_t block, bool* from_disk);
  int slot(int32_t block) const;  // of the host

  void poll();          // ends of disk operations; writes to the disk what should be there
  bool moving() const;  // anything is under way by itself: a store, a read, a write

  // Of the counters those that only the caller can count: f(OffloadStats&).
  template <class F>
  void count(F&& f) {
    std::lock_guard lock(mutex_);
    f(stats_);
  }

  OffloadStats stats() const;
  void check_invariants() const;
  std::vector<uint64_t> held(Tier tier) const;  // what listeners have been told, by the blocks themselves

 private:
  // Sets of blocks in the order in which they go.
  enum Order : int {
    kClean,      // on the host and on the disk: can be given up on the host at once
    kDirtyLeaf,  // on the host only, continued by none: lost if given up
    kDirty,      // on the host only, not yet on its way to the disk
    kDiskLeaf,   // on the disk only, continued by none
    kOrders
  };
  using Place = std::tuple<EvictionRank, int, int32_t>;  // rank, -position, block
  struct Block {
    int32_t parent = -1;                 // the block before it, if that is still known (parent_of())
    uint64_t hash = 0, parent_hash = 0;  // the latter of a first block: the salt
    BlockUse use;
    int children = 0;  // known blocks that continue it
    int pins = 0;
    int host = -1, disk = -1;  // slots
    int disk_target = -1;      // being written
    bool storing = false, writing = false, reading = false, lost = false;
    uint64_t checksum = 0;
    bool clean = false;      // on the host and on the disk
    bool told[kTiers] = {};  // to listeners: it is there
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
  int32_t parent_of(int32_t block) const;  // -1: a first block, or it is known no more
  bool is_in(int32_t block, Tier tier) const;
  bool disk_on() const { return disk_ && !writes_off_; }
  void refresh(int32_t block);
  void tell(int32_t block);
  void set_host(int32_t block, int slot);
  int32_t goes_first(Order order) const;
  int take_host_slot();
  int take_disk_slot();
  void drop_host(int32_t block);
  void remove(int32_t block);
  void write_behind();
  void relieve();
  void ended(const DiskFile::Done& done);
  void disk_failed(const std::string& what, bool reads_too);

  const OffloadOptions options_;
  const Seams seams_;
  KvLayout layout_;
  std::shared_ptr<std::byte> host_;
  const EvictionPolicy *host_policy_, *disk_policy_;

  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  std::vector<int32_t> unused_;
  std::vector<PrefixCache::Node> nodes_;  // [as many as there are slots]
  std::unique_ptr<PrefixIndex> index_;    // what is in it is known
  std::set<Place> orders_[kOrders];
  std::vector<int> free_host_, free_disk_;  // slots
  int disk_slots_ = 0;
  int64_t tick_ = 1;
  int storing_ = 0, writing_ = 0, reading_ = 0, clean_ = 0;  // blocks
  bool writes_off_ = false, logged_ = false;
  int failed_reads_ = 0;
  OffloadStats stats_;
  std::vector<DiskFile::Done> done_;
  std::unique_ptr<DiskFile> disk_;  // last: its thread ends before the memory that it reads goes
};

}  // namespace xpyd::allocator
