// What lies below an instance's KV pool: host memory, then a disk (offload_tiers.h).
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

struct OffloadOptions {
  size_t host_bytes = 0;         // 0: no host tier, and no disk below it
  std::string disk_dir;          // empty: no disk tier
  size_t disk_bytes = 0;         // at most, in disk_dir
  int block_tokens = 16;         // tokens that are kept, found and moved together
  double copy_gbps = 0;          // CPU: device <-> host copies take at least bytes / this; 0: no limit
  bool wait_for_copies = false;  // the engine waits for each device <-> host copy (an ablation)
  bool load_by_cost = false;     // a prefix is loaded only where that is worth its time (KvLoader::loads_if)
  bool keep_arrivals = true;     // what adopt() brings is kept at once; else when it is set aside
  std::string host_eviction = "lru", disk_eviction = "lru";  // eviction.h
  double high_watermark = 0.9, low_watermark = 0.85;         // of the host, where there is a disk below it
  // Is told of every block that makes room for another one: who stood first, in that order (eight at most), the one
  // that goes at the head. From the owner's thread; null: nobody asks.
  std::function<void(const EvictionPolicy& policy, std::span<const BlockUse> first)> evicts = {};
  std::vector<std::shared_ptr<CacheListener>> listeners = {};  // are told what the host and the disk hold
  bool on() const { return host_bytes > 0; }
};

// Cumulative; bytes of KV.
struct OffloadStats {
  int64_t host_blocks = 0, host_capacity = 0, disk_blocks = 0, disk_capacity = 0;  // now
  int64_t bytes_out = 0, bytes_in = 0;                                             // device -> host, host -> device
  int64_t copies_out = 0, copies_in = 0;                                           // pieces, after coalescing
  int64_t disk_bytes_written = 0, disk_bytes_read = 0;
  int64_t host_hit_tokens = 0, disk_hit_tokens = 0;  // of sequences that went on from them
  int64_t host_evictions = 0, disk_evictions = 0;
  int64_t host_relieved = 0;  // blocks that the host gave up to have room, which nobody had asked for
  int64_t failed_writes = 0, failed_reads = 0, corrupt_reads = 0;  // each a recompute at most
  int64_t dropped_out = 0;                                         // blocks not kept: the tier was full or busy
  double load_wait_seconds = 0;                                    // sequences waited for their KV to come back
};

}  // namespace xpyd::allocator
