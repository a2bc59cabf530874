// The one pool of a handoff wire whose instances are processes of one host: a memfd with the KV of
// all of them and the ledger of who holds what (allocator/block_ledger.h). The conductor makes it,
// says its address in Welcome, and passes the file to whoever connects there: over a Unix socket,
// to processes of the same user. It outlives the conductor in those who have it mapped.
//
// Thread safety: any thread.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "allocator/block_pool.h"
#include "allocator/kv_memory.h"
#include "base/status.h"

namespace xpyd {

class HandoffPool {
 public:
  // `options`: of one instance; the pool has n_instances times its pool_bytes, allocated and
  // touched here. Errors: `invalid_argument`, the options; `unavailable`, not that much memory.
  static Result<std::unique_ptr<HandoffPool>> create(const std::string& scheme,
                                                     const KvOptions& options, int n_instances);
  ~HandoffPool();

  const std::string& address() const { return address_; }
  // Gives back what dead processes held.
  void reap() { ledger_->reap(); }
  const BlockLedger& ledger() const { return *ledger_; }

 private:
  HandoffPool() = default;
  Status listen();
  void serve();

  int file_ = -1, listener_ = -1, stop_ = -1;
  std::string address_;
  std::unique_ptr<BlockLedger> ledger_;  // as an observer
  std::thread thread_;
};

struct JoinedPool {
  std::shared_ptr<BlockPool> pool;  // this process's view of it
  int n_instances = 0;              // whose pool_bytes it has
};
// `options`: as the conductor's, of one instance. Errors: `unavailable`, nobody of this user
// answers there; `invalid_argument`, the pool is of other options than these; `io`.
Result<JoinedPool> join_handoff_pool(const std::string& address, const std::string& scheme,
                                     const KvOptions& options);

}  // namespace xpyd
