// One preallocated file of equal blocks, read and written directly (O_DIRECT) through io_uring by a
// thread of its own, each block with a checksum that the caller keeps: a short, failed or corrupt
// read is told, and its bytes are not to be used.
//
// The kernel may refuse to take operations (no memory for them): they are tried again for some
// milliseconds, then they have failed. Nothing else is lost, and the next ones are tried anew.
//
// The file is unlinked as soon as it is open, so that nothing stays behind however the process ends.
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

// A test's hand on the disk: sees each finished operation, its bytes, and its result as the kernel
// told it (bytes, or -errno), and gives the result that we are told. On the disk's thread.
using DiskFault = std::function<int(bool write, std::span<std::byte> data, int result)>;

// The same for handing operations to the kernel: 0, or the -errno with which that fails.
using DiskRefusal = std::function<int()>;

class DiskFile {
 public:
  static constexpr size_t kSector = 4096;  // blocks are padded to it
  static constexpr int kDepth = 32;        // operations that the kernel has at once

  enum class Outcome { done, failed, corrupt };
  struct Done {
    int64_t id;
    bool write;
    Outcome outcome;
    int error;          // errno, or 0: fewer bytes than asked for
    uint64_t checksum;  // of what was written
  };

  // The errors name `dir`, what it must be, and the option.
  static Result<std::unique_ptr<DiskFile>> open(const std::string& dir, size_t block_bytes, int n_blocks,
                                                DiskFault fault = {}, DiskRefusal refusal = {});
  ~DiskFile();  // after what is under way

  // The memory stays as it is, and the caller's, until Done with this id.
  void write(int block, const std::byte* from, int64_t id);
  void read(int block, std::byte* to, uint64_t checksum, int64_t id);
  void take(std::vector<Done>& done);  // appends what has ended

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
  std::vector<Operation> under_way_;   // [kDepth]; the thread's
  std::vector<int> unused_;
  struct Entry {
    int slot;  // or kNobodys
    io_uring_sqe* sqe;
  };
  std::deque<Entry> not_taken_;  // of the ring, in order: not taken by the kernel yet
  int refusals_ = 0;             // one after the other

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Operation> queue_;
  std::vector<Done> done_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace xpyd::allocator
