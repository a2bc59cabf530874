#include "allocator/offload/disk_file.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/memory.h"

namespace xpyd::allocator {
namespace {

constexpr int kRefusals = 16;  // refusals in a row after which operations fail
constexpr int kNobodys = -1;   // in place of a slot: an operation that was given up

std::string why(int error) { return std::strerror(error); }

Error bad(const std::string& dir, const std::string& what) { return invalid("--disk-kv-dir " + dir + ": " + what); }

bool on_sector(const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % DiskFile::kSector == 0; }

Result<Fd> make_file(const std::string& dir, size_t bytes) {
  struct stat about;
  if (::stat(dir.c_str(), &about) != 0) return bad(dir, why(errno) + "; expected a folder");
  if (!S_ISDIR(about.st_mode)) return bad(dir, "expected a folder");
  struct statvfs space;
  if (::statvfs(dir.c_str(), &space) == 0) {
    const size_t there = size_t(space.f_bavail) * size_t(space.f_frsize);
    if (there < bytes)
      return bad(dir, "--disk-kv-bytes is " + std::to_string(bytes) + ", but the disk has only " +
                          std::to_string(there) + " bytes left");
  }
  static std::atomic<int> count{0};
  const std::string path = dir + "/xpyd-kv-" + std::to_string(::getpid()) + "-" + std::to_string(count.fetch_add(1));
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600));
  const int error = errno;
  // Some file systems create the file before they refuse O_DIRECT (EINVAL). After any other error, a file of that name
  // is not ours: with EMFILE, for example, the kernel has not even looked whether it exists.
  if (fd.get() >= 0 || error == EINVAL) ::unlink(path.c_str());
  if (fd.get() < 0)
    return bad(dir,
               error == EINVAL ? "its file system has no direct I/O (O_DIRECT)" : "cannot write to it: " + why(error));
  const int refused = ::posix_fallocate(fd.get(), 0, off_t(bytes));
  if (refused != 0) return bad(dir, "--disk-kv-bytes " + std::to_string(bytes) + ": " + why(refused));
  return fd;
}

}  // namespace

struct DiskFile::Ring {
  io_uring ring;
  const int error = -io_uring_queue_init(kDepth, &ring, 0);
  ~Ring() {
    if (error == 0) io_uring_queue_exit(&ring);
  }
};

Result<std::unique_ptr<DiskFile>> DiskFile::open(const std::string& dir, size_t block_bytes, int n_blocks,
                                                 DiskFault fault, DiskRefusal refusal) try {
  Fd fd = need(make_file(dir, padded(block_bytes) * size_t(n_blocks)));
  auto ring = std::make_unique<Ring>();
  if (ring->error != 0) return bad(dir, "io_uring is not permitted: " + why(ring->error));
  return std::unique_ptr<DiskFile>(
      new DiskFile(std::move(fd), std::move(ring), block_bytes, std::move(fault), std::move(refusal)));
} catch (const Error& error) {
  return error;
}

DiskFile::DiskFile(Fd fd, std::unique_ptr<Ring> ring, size_t block_bytes, DiskFault fault, DiskRefusal refusal)
    : fd_(std::move(fd)),
      ring_(std::move(ring)),
      block_bytes_(block_bytes),
      padded_bytes_(padded(block_bytes)),
      fault_(std::move(fault)),
      refusal_(std::move(refusal)),
      under_way_(size_t(kDepth)) {
  for (int slot = kDepth; slot-- > 0;) unused_.push_back(slot);
  if (padded_bytes_ != block_bytes_) {
    auto buffer = std::make_shared<Buffer>(size_t(kDepth) * padded_bytes_);
    bounce_ = std::shared_ptr<std::byte>(buffer, buffer->data());
  }
  thread_ = std::thread([this] { work(); });
}

DiskFile::~DiskFile() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

void DiskFile::write(int block, const std::byte* from, int64_t id) {
  post({true, block, const_cast<std::byte*>(from), 0, id});
}

void DiskFile::read(int block, std::byte* to, uint64_t checksum, int64_t id) { post({false, block, to, checksum, id}); }

void DiskFile::post(Operation operation) {
  XPYD_CHECK(bounce_ || on_sector(operation.data), "memory that direct I/O cannot use");
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(operation);
  }
  posted_.notify_one();
}

void DiskFile::take(std::vector<Done>& done) {
  std::lock_guard lock(mutex_);
  done.insert(done.end(), done_.begin(), done_.end());
  done_.clear();
}

std::byte* DiskFile::memory(const Operation& operation, int slot) const {
  return bounce_ ? bounce_.get() + size_t(slot) * padded_bytes_ : operation.data;
}

void DiskFile::prepare(int slot) {
  Operation& o = under_way_[size_t(slot)];
  std::byte* data = memory(o, slot);
  if (o.write) {
    o.checksum = XXH3_64bits(o.data, block_bytes_);
    if (bounce_) std::memcpy(data, o.data, block_bytes_);
  }
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_->ring);
  XPYD_CHECK(sqe);
  const uint64_t offset = uint64_t(o.block) * padded_bytes_;
  if (o.write) {
    io_uring_prep_write(sqe, fd_.get(), data, unsigned(padded_bytes_), offset);
  } else {
    io_uring_prep_read(sqe, fd_.get(), data, unsigned(padded_bytes_), offset);
  }
  io_uring_sqe_set_data64(sqe, uint64_t(slot));
  not_taken_.push_back({slot, sqe});
}

// Gives the kernel the entries of the ring, and waits until one operation ends.
void DiskFile::hand_over(std::vector<Done>& ended) {
  int taken = refusal_ && !not_taken_.empty() ? refusal_() : 0;
  if (taken == 0) taken = io_uring_submit_and_wait(&ring_->ring, 1);
  if (taken >= 0) {
    refusals_ = 0;
    not_taken_.erase(not_taken_.begin(), not_taken_.begin() + taken);
    return;
  }
  if (taken == -EINTR || taken == -EBUSY) return;  // EBUSY: ended operations must be taken first
  if (++refusals_ < kRefusals) return std::this_thread::sleep_for(std::chrono::milliseconds(1));
  refusals_ = 0;
  give_up(taken, ended);
}

// The kernel reads the ring in order, so entries that it has not taken become no-ops.
void DiskFile::give_up(int error, std::vector<Done>& ended) {
  for (auto& [slot, sqe] : not_taken_) {
    if (slot == kNobodys) continue;
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data64(sqe, uint64_t(kNobodys));
    finish(std::exchange(slot, kNobodys), error, ended);
  }
}

void DiskFile::finish(int slot, int result, std::vector<Done>& ended) {
  const Operation& o = under_way_[size_t(slot)];
  std::byte* data = memory(o, slot);
  if (fault_) result = fault_(o.write, {data, block_bytes_}, result);
  Done done{o.id, o.write, Outcome::done, 0, o.checksum};
  if (result != int(padded_bytes_)) {
    done.outcome = Outcome::failed;
    done.error = result < 0 ? -result : 0;
  } else if (!o.write && XXH3_64bits(data, block_bytes_) != o.checksum) {
    done.outcome = Outcome::corrupt;
  } else if (!o.write && bounce_) {
    std::memcpy(o.data, data, block_bytes_);
  }
  ended.push_back(done);
  unused_.push_back(slot);
}

void DiskFile::work() {
  std::vector<int> fresh;
  std::vector<Done> ended;
  while (true) {
    fresh.clear();
    {
      std::unique_lock lock(mutex_);
      done_.insert(done_.end(), ended.begin(), ended.end());
      ended.clear();
      const bool idle = int(unused_.size()) == kDepth;
      if (idle) posted_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (idle && queue_.empty()) return;
      while (!queue_.empty() && !unused_.empty()) {
        fresh.push_back(unused_.back());
        unused_.pop_back();
        under_way_[size_t(fresh.back())] = queue_.front();
        queue_.pop_front();
      }
    }
    if (not_taken_.size() + fresh.size() > kDepth) hand_over(ended);  // entries that were given up take room
    for (int slot : fresh) {
      if (not_taken_.size() < kDepth) {
        prepare(slot);
      } else {
        finish(slot, -EAGAIN, ended);
      }
    }
    hand_over(ended);
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_->ring, &cqe) == 0) {
      const uint64_t data = io_uring_cqe_get_data64(cqe);
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_->ring, cqe);
      if (data != uint64_t(kNobodys)) finish(int(data), result, ended);
    }
  }
}

}  // namespace xpyd::allocator
