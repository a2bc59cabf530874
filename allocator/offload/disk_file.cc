#include "allocator/offload/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace xpyd::allocator {
namespace {

std::string why(int error) { return std::strerror(error); }

Error bad(const std::string& dir, const std::string& what) { return invalid("--disk-kv-dir " + dir + ": " + what); }

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
  std::string path = dir + "/xpyd-kv-XXXXXX";
  Fd fd(::mkostemp(path.data(), O_CLOEXEC));
  if (fd.get() < 0) return bad(dir, "cannot write to it: " + why(errno));
  ::unlink(path.c_str());
  const int refused = ::posix_fallocate(fd.get(), 0, off_t(bytes));
  if (refused != 0) return bad(dir, "--disk-kv-bytes " + std::to_string(bytes) + ": " + why(refused));
  return fd;
}

}  // namespace

Result<std::unique_ptr<DiskFile>> DiskFile::open(const std::string& dir, size_t block_bytes, int n_blocks,
                                                 DiskFault fault) {
  Result<Fd> fd = make_file(dir, block_bytes * size_t(n_blocks));
  if (!fd) return fd.error();
  return std::unique_ptr<DiskFile>(new DiskFile(std::move(fd).value(), block_bytes, std::move(fault)));
}

void DiskFile::write(int block, const std::byte* from, int64_t id) {
  post({true, block, const_cast<std::byte*>(from), 0, id});
}

void DiskFile::read(int block, std::byte* to, uint64_t checksum, int64_t id) { post({false, block, to, checksum, id}); }

void DiskFile::post(const Operation& operation) {
  thread_.post([this, operation] {
    Done done = run(operation);
    std::lock_guard lock(mutex_);
    done_.push_back(std::move(done));
    return true;
  });
}

void DiskFile::take(std::vector<Done>& done) {
  std::lock_guard lock(mutex_);
  done.insert(done.end(), done_.begin(), done_.end());
  done_.clear();
}

DiskFile::Done DiskFile::run(const Operation& o) const {
  Done done{o.id, o.write, "", o.write ? XXH3_64bits(o.data, block_bytes_) : o.checksum};
  const off_t offset = off_t(o.block) * off_t(block_bytes_);
  ssize_t result = o.write ? ::pwrite(fd_.get(), o.data, block_bytes_, offset)
                           : ::pread(fd_.get(), o.data, block_bytes_, offset);
  if (result < 0) result = -errno;
  if (fault_) result = fault_(o.write, {o.data, block_bytes_}, int(result));
  if (result < 0) {
    done.error = why(int(-result));
  } else if (result != ssize_t(block_bytes_)) {
    done.error = "the disk moved fewer bytes than requested";
  } else if (!o.write && XXH3_64bits(o.data, block_bytes_) != o.checksum) {
    done.error = "the checksum of a block is wrong";
  }
  return done;
}

}  // namespace xpyd::allocator
