// DiskFile: one preallocated file of equal blocks, which a thread of its own reads and writes directly (O_DIRECT)
// through io_uring. Each block has a checksum, which the caller stores. A short, failed or corrupt read is reported,
// and its bytes must not be used.
//
// The kernel may refuse operations when it lacks memory for them. They are tried again for some milliseconds, then they
// fail. Only these operations fail; later ones are tried anew.
//
// The file is unlinked as soon as it is open, so it never outlives the process.
//
// Thread safety: one owner.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/os.h"
#include "base/status.h"

struct io_uring_sqe;

namespace xpyd::allocator {

// A fault injected by tests. It sees each finished operation, its bytes and its result from the kernel (bytes, or
// -errno), and returns the result that DiskFile then sees. It runs on the disk's thread.
using DiskFault = std::function<int(bool write, std::span<std::byte> data, int result)>;

// A fault injected into handing operations to the kernel: returns 0, or the -errno of a refusal.
using DiskRefusal = std::function<int()>;

class DiskFile {
 public:
  static constexpr size_t kSector = 4096;  // blocks are padded to a multiple of this
  static constexpr int kDepth = 32;        // operations in the kernel at once

  enum class Outcome { done, failed, corrupt };
  struct Done {
    int64_t id;
    bool write;
    Outcome outcome;
    int error;          // errno; 0: fewer bytes than asked for
    uint64_t checksum;  // of the written bytes
  };

  // Errors name `dir`, what is expected of it, and the option.
  static Result<std::unique_ptr<DiskFile>> open(const std::string& dir, size_t block_bytes, int n_blocks,
                                                DiskFault fault = {}, DiskRefusal refusal = {});
  ~DiskFile();  // waits for operations under way

  // The caller keeps the memory, and does not change it, until take() returns Done with this id.
  void write(int block, const std::byte* from, int64_t id);
  void read(int block, std::byte* to, uint64_t checksum, int64_t id);
  void take(std::vector<Done>& done);  // appends the operations that have ended

  static size_t padded(size_t block_bytes) { return (block_bytes + kSector - 1) / kSector * kSector; }

 private:
  struct Operation {
    bool write;
    int block;
    std::byte* data;
    uint64_t checksum;
    int64_t id;
  };
  struct Ring;
  DiskFile(Fd fd, std::unique_ptr<Ring> ring, size_t block_bytes, DiskFault fault, DiskRefusal refusal);
  void post(Operation operation);
  void work();
  void prepare(int slot);
  void hand_over(std::vector<Done>& ended);
  void give_up(int error, std::vector<Done>& ended);
  void finish(int slot, int result, std::vector<Done>& ended);
  std::byte* memory(const Operation& operation, int slot) const;

  const Fd fd_;
  const std::unique_ptr<Ring> ring_;
  const size_t block_bytes_, padded_bytes_;
  const DiskFault fault_;
  const DiskRefusal refusal_;
  std::shared_ptr<std::byte> bounce_;  // [kDepth, padded_bytes_]
  std::vector<Operation> under_way_;   // [kDepth]; used by the thread only
  std::vector<int> unused_;
  struct Entry {
    int slot;  // or kNobodys
    io_uring_sqe* sqe;
  };
  std::deque<Entry> not_taken_;  // entries of the ring that the kernel has not taken yet, in order
  int refusals_ = 0;             // in a row

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Operation> queue_;
  std::vector<Done> done_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace xpyd::allocator
