// Options and statistics of the offload tiers below an instance's KV pool: host memory, then a disk (offload_tiers.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/eviction.h"
#include "allocator/prefix_log.h"

namespace xpyd::allocator {

// Copies from the device to the host whose ends were found together. Times are Clock seconds.
struct StoredBlocks {
  double begin_s = 0, end_s = 0;  // when the first began, or the ends before it were found; when their ends were found
  int blocks = 0;
  int64_t bytes = 0;
};

struct OffloadOptions {
  size_t host_bytes = 0;         // 0: no host tier, and then no disk tier
  std::string disk_dir;          // empty: no disk tier
  size_t disk_bytes = 0;         // at most, in disk_dir
  int block_tokens = 16;         // tokens that are kept, found and moved as one block
  double copy_gbps = 0;          // CPU only: a device <-> host copy takes at least bytes / this; 0: no limit
  std::string eviction = "lru";  // of both tiers: eviction.h
  // Called for every block that is evicted to make room, on the owner's thread. `first`: at most eight blocks in the
  // order of eviction; the one at the head is evicted. Null: not called.
  std::function<void(const EvictionPolicy& policy, std::span<const BlockUse> first)> evicts = {};
  std::function<void(const StoredBlocks& stored)> stores = {};  // called on the owner's thread; null: not called
  std::vector<std::shared_ptr<CacheListener>> listeners = {};   // are told which blocks the host and the disk have
  bool on() const { return host_bytes > 0; }
};

// Cumulative, unless marked; bytes are bytes of KV.
struct OffloadStats {
  int64_t host_blocks = 0, host_capacity = 0, disk_blocks = 0, disk_capacity = 0;  // now
  int64_t bytes_out = 0, bytes_in = 0;                                             // device -> host, host -> device
  int64_t copies_out = 0, copies_in = 0;                                           // pieces, after coalescing
  int64_t disk_bytes_written = 0, disk_bytes_read = 0;
  int64_t host_hit_tokens = 0, disk_hit_tokens = 0;  // tokens of hits from which a sequence continued
  int64_t host_evictions = 0, disk_evictions = 0;
  int64_t failed_writes = 0, failed_reads = 0;  // a wrong checksum counts as a failed read
  int64_t dropped_out = 0;                      // blocks not kept because the offload tier was full or busy
  double load_wait_seconds = 0;                 // that sequences waited for their KV
  double store_seconds = 0;                     // in which copies out were under way: the sum of StoredBlocks
};

}  // namespace xpyd::allocator
