// The one pool of a handoff wire whose instances are processes of one host: a memfd with the KV of all of them and the
// ledger of who holds what (allocator/pool/block_ledger.h). On a card the ledger alone is there, and the KV is memory
// that the card's driver exports by file descriptor (MemoryExporter, base/device/device.h). The conductor makes it,
// says its address in Welcome, and passes the files to whoever connects there: over a Unix socket, to processes of the
// same user. It outlives the conductor in those who have it mapped.
//
// Instances of several ranks have the KV of each rank behind that of the one before. All of them have the same ranks: a
// block id names bytes of every rank, and other ranks would cut them otherwise.
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
  // `options`: of one instance, on the ranks of `shards`; the pool has n_instances times its
  // pool_bytes, allocated and touched here, on options.device. Errors: `invalid_argument`, the
  // options; `unavailable`, not that much memory, or the device shares none.
  static Result<std::unique_ptr<HandoffPool>> create(const std::string& scheme, const KvOptions& options,
                                                     int n_instances, const KvShards& shards = {});

  const std::string& address() const { return address_; }
  // Gives back what dead processes held.
  void reap() { ledger_->reap(); }
  const BlockLedger& ledger() const { return *ledger_; }
  // Of all instances: the KV, and of it one block on all ranks.
  size_t bytes() const { return bytes_; }
  size_t block_bytes() const { return block_bytes_; }

 private:
  HandoffPool() = default;
  Fd file_, card_file_;
  size_t bytes_ = 0, block_bytes_ = 0;
  std::shared_ptr<std::byte> card_memory_;  // null: the KV is in the file
  std::string address_;
  std::unique_ptr<BlockLedger> ledger_;   // as an observer
  std::unique_ptr<Bootstrap> bootstrap_;  // with those who join
};

struct JoinedPool {
  std::shared_ptr<KvPool> pool;  // this process's view of it
  int n_instances = 0;           // whose pool_bytes it has
};
// `options`, `shards`: as the conductor's, of one instance. Errors: `unavailable`, nobody of this user answers there;
// `invalid_argument`, the pool is of other options than these, or on another card; `io`.
Result<JoinedPool> join_handoff_pool(const std::string& address, const std::string& scheme, const KvOptions& options,
                                     const KvShards& shards = {});

}  // namespace xpyd::disagg
