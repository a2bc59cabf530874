// A file with a ledger and the bytes of its blocks, as processes of one host share it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <memory>

#include "allocator/pool/block_ledger.h"
#include "allocator/pool/block_pool.h"
#include "allocator/schemes.h"

namespace xpyd::testing {

class SharedBlocks {
 public:
  SharedBlocks(int n_blocks, size_t more_bytes)
      : n_blocks_(n_blocks),
        ledger_bytes_((BlockLedger::bytes(n_blocks) + 4095) / 4096 * 4096),
        bytes_(ledger_bytes_ + more_bytes),
        file_(memfd_create("xpyd-test", MFD_CLOEXEC)) {
    XPYD_CHECK(file_ >= 0 && ftruncate(file_, off_t(bytes_)) == 0);
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    XPYD_CHECK(at != MAP_FAILED);
    memory_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(at), [n = bytes_](std::byte* p) { munmap(p, n); });
  }
  ~SharedBlocks() { close(file_); }
  SharedBlocks(const SharedBlocks&) = delete;

  std::unique_ptr<BlockLedger> join(BlockLedger::As as = BlockLedger::As::member) const {
    return BlockLedger::join(memory_, n_blocks_, file_, as).value();
  }
  Result<std::unique_ptr<BlockLedger>> try_join() const {
    return BlockLedger::join(memory_, n_blocks_, file_, BlockLedger::As::member);
  }
  std::byte* data() const { return memory_.get() + ledger_bytes_; }
  // Returns one process's pool over the shared blocks.
  std::shared_ptr<BlockPool> pool(const KvOptions& options, int n_sharing) const {
    const KvLayout layout = plan_pool("paged", options).value();
    return std::make_shared<BlockPool>(KvPlaces(layout, {memory_, data()}), options.prefix_cache, join(),
                                       n_blocks_ / n_sharing);
  }

 private:
  const int n_blocks_;
  const size_t ledger_bytes_, bytes_;
  const int file_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace xpyd::testing
