// DiskFile: one preallocated file of equal blocks, which a thread of its own reads and writes in order. Each block has
// a checksum, which the caller stores. A short, failed or corrupt read is reported, and its bytes must not be used.
//
// The file is unlinked as soon as it is open, so it never outlives the process.
//
// Thread safety: one owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/job_thread.h"
#include "base/os.h"
#include "base/status.h"

namespace xpyd::allocator {

// A fault injected by tests. It sees each finished operation, its bytes and its result from the kernel (bytes, or
// -errno), and returns the result that DiskFile then sees. It runs on the disk's thread.
using DiskFault = std::function<int(bool write, std::span<std::byte> data, int result)>;

class DiskFile {
 public:
  struct Done {
    int64_t id;
    bool write;
    std::string error;  // empty: it succeeded
    uint64_t checksum;  // of the block
  };

  // Errors name `dir`, what is expected of it, and the option.
  static Result<std::unique_ptr<DiskFile>> open(const std::string& dir, size_t block_bytes, int n_blocks,
                                                DiskFault fault = {});

  // The caller keeps the memory, and does not change it, until take() returns Done with this id.
  void write(int block, const std::byte* from, int64_t id);
  void read(int block, std::byte* to, uint64_t checksum, int64_t id);
  void take(std::vector<Done>& done);  // appends the operations that have ended

 private:
  struct Operation {
    bool write;
    int block;
    std::byte* data;
    uint64_t checksum;
    int64_t id;
  };
  DiskFile(Fd fd, size_t block_bytes, DiskFault fault)
      : fd_(std::move(fd)), block_bytes_(block_bytes), fault_(std::move(fault)) {}
  void post(const Operation& operation);
  Done run(const Operation& operation) const;

  const Fd fd_;
  const size_t block_bytes_;
  const DiskFault fault_;

  std::mutex mutex_;
  std::vector<Done> done_;  // guarded by mutex_
  JobThread thread_;        // last, so that operations under way end before what they use goes
};

}  // namespace xpyd::allocator
