// HandoffPool is the one pool of the handoff transport if its instances are processes of one host. It is a memfd with
// the KV of all instances and the ledger that says which process holds which block (allocator/pool/block_ledger.h).
// With a card the memfd has the ledger only, and the KV is memory that the driver exports by file descriptor
// (MemoryExporter, base/device/device.h). The conductor makes the pool and puts its address into Welcome. It passes the
// files over a Unix socket to processes of the same user. Processes that have it mapped keep it if the conductor ends.
//
// If instances have several ranks, the KV of each rank follows that of the one before. All instances must have the same
// ranks, because a block id names bytes on every rank.
//
// Thread safety: any thread.
#pragma once

#include <memory>
#include <string>

#include "allocator/kv_pool.h"
#include "allocator/pool/block_ledger.h"
#include "base/status.h"
#include "disagg/transport/bootstrap.h"

namespace xpyd::disagg {

class HandoffPool {
 public:
  // `options` are those of one instance, on the ranks of `shards`. The pool has n_instances times its pool_bytes,
  // allocated and touched here, on options.device. Errors: `invalid_argument`, the options; `unavailable`, there is not
  // enough memory, or the device cannot share it.
  static Result<std::unique_ptr<HandoffPool>> create(const std::string& scheme, const KvOptions& options,
                                                     int n_instances, const KvShards& shards = {});

  const std::string& address() const { return address_; }
  // Gives back the blocks of dead processes.
  void reap() { ledger_->reap(); }
  const BlockLedger& ledger() const { return *ledger_; }
  // Bytes of the KV of all instances, and of one block on all ranks.
  size_t bytes() const { return bytes_; }
  size_t block_bytes() const { return block_bytes_; }

 private:
  HandoffPool() = default;
  Fd file_, card_file_;
  size_t bytes_ = 0, block_bytes_ = 0;
  std::shared_ptr<std::byte> card_memory_;  // null: the KV is in the file
  std::string address_;
  std::unique_ptr<BlockLedger> ledger_;   // as an observer
  std::unique_ptr<Bootstrap> bootstrap_;  // with the processes that join
};

struct JoinedPool {
  std::shared_ptr<KvPool> pool;  // this process's view
  int n_instances = 0;           // the number of instances for which it was made
};
// Joins the pool at `address`. `options` and `shards` are those of one instance, as at the conductor. Errors:
// `unavailable`, no process of this user answers, or all places are taken; `invalid_argument`, the pool has other
// options or is on another card; `io`.
Result<JoinedPool> join_handoff_pool(const std::string& address, const std::string& scheme, const KvOptions& options,
                                     const KvShards& shards = {});

}  // namespace xpyd::disagg
