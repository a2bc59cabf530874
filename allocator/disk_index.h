// What is kept of a disk tier beyond its process: the file of blocks, NAME.kv (disk_file.h), and beside it NAME.index,
// a log that says which block is in which slot.
//
// The log begins with lines that say what the blocks are of. A log with other lines is begun anew, and one line says
// which differs. Then come records: a block is in a slot, whole; or a slot is another's to have. Each has a checksum of
// its own, seeded with its place in the file; the first that has not the right one is the end, as where a process is
// killed while it writes one. Order is what makes it right: a block is told after its bytes have been written, a slot
// is dropped before other bytes are written there. The log grows until it has twice what it would need, then it is
// written anew beside and takes the old one's name.
//
// Nothing is synced: what the kernel has been given survives a process, however it ends. After a loss of power a record
// may stand for bytes that never arrived; their checksum, which the record has, says so when they are read.
//
// Thread safety: one owner.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/os.h"
#include "base/status.h"

namespace xpyd::allocator {

using DiskIdentity = std::vector<std::pair<std::string, std::string>>;  // name, value

// Blocks have the numbers that their KvTiers gave them: no two of one log have the same, ever.
struct DiskBlock {
  int32_t slot = -1;
  bool first = false;  // of its sequences
  uint64_t uid = 0;
  uint64_t parent_uid = 0;  // of the block before it; of a first block the salt
  uint64_t checksum = 0;    // of its bytes
  std::vector<int32_t> tokens;
  bool operator==(const DiskBlock&) const = default;
};

struct DiskIndexContents {
  std::vector<DiskBlock> blocks;  // in the order in which they came
  size_t cut = 0;                 // bytes at the end that are no records
  std::string other;              // why nothing is read of it, where something is there
};
DiskIndexContents parse_disk_index(std::string_view bytes, const DiskIdentity& identity, int block_tokens);
DiskIndexContents read_disk_index(const std::string& path, const DiskIdentity& identity, int block_tokens);

class DiskIndex {
 public:
  // A new log without records, beside `path`; after commit() in its place.
  static Result<std::unique_ptr<DiskIndex>> create(const std::string& path, const DiskIdentity& identity);
  // From the next flush() on, in this order.
  void put(int32_t slot, bool first, uint64_t uid, uint64_t parent_uid, uint64_t checksum,
           std::span<const int32_t> tokens);
  void drop(int32_t slot);  // that a block is in
  // The kernel has all of it. After an error no later record is written.
  Status flush();
  Status commit();
  bool grown() const { return size_ > kLeast && size_ > 2 * (head_ + live_); }

 private:
  static constexpr size_t kLeast = size_t{1} << 20;  // bytes: below, nobody minds
  DiskIndex(std::string path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  void seal(size_t begin);

  const std::string path_;
  const Fd fd_;
  size_t size_ = 0, head_ = 0, live_ = 0, put_bytes_ = 0;  // size_: with what is in pending_
  std::string pending_;
  bool failed_ = false;
};

// DIR/xpyd-ROLE-N, for the least N that nobody has: whoever is started again goes on with what the one before it left.
// Ours while this lives; the lock goes with the process.
class DiskName {
 public:
  static Result<std::unique_ptr<DiskName>> take(const std::string& dir, const std::string& role);
  std::string data() const { return path_ + ".kv"; }  // is there; perhaps empty
  std::string index() const { return path_ + ".index"; }
  size_t bytes() const { return bytes_; }  // that the data file had

 private:
  DiskName(std::string path, Fd lock, size_t bytes) : path_(std::move(path)), lock_(std::move(lock)), bytes_(bytes) {}
  const std::string path_;
  const Fd lock_;
  const size_t bytes_;
};

}  // namespace xpyd::allocator
