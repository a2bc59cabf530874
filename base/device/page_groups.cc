#include "base/device/page_groups.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/memory.h"
#include "base/os.h"

namespace xpyd {
namespace {

Error os_error(const std::string& what) { return {ErrorCode::unavailable, what + ": " + std::strerror(errno)}; }

class HostGroups final : public PageGroups, public std::enable_shared_from_this<HostGroups> {
 public:
  HostGroups(const PageGroupOptions& options, Fd fd) : PageGroups(options), fd_(std::move(fd)) {}
  Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override;
  int fd() const { return fd_.get(); }

 private:
  const Fd fd_;
};

class HostRange final : public VirtualRange {
 public:
  HostRange(std::shared_ptr<HostGroups> groups, void* at, size_t bytes)
      : groups_(std::move(groups)), o_(groups_->options()) {
    data_ = static_cast<std::byte*>(at);
    bytes_ = bytes;
  }
  ~HostRange() override { ::munmap(data_, bytes_); }

  // MAP_POPULATE: the caller of map() pays for the page tables, and no kernel ever faults.
  Status map(size_t offset, int group, int n) override {
    const size_t bytes = size_t(n) * o_.group_bytes;
    XPYD_CHECK(offset + bytes <= bytes_ && group >= 0 && group + n <= o_.n_groups);
    void* at = ::mmap(data_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                      groups_->fd(), off_t(size_t(group) * o_.group_bytes));
    return at == MAP_FAILED ? Status(os_error("mmap of a page group")) : ok();
  }

  // mmap and not munmap, because another thread could be given the hole.
  void unmap(size_t offset, int n) override {
    const size_t bytes = size_t(n) * o_.group_bytes;
    XPYD_CHECK(offset + bytes <= bytes_);
    void* at = ::mmap(data_ + offset, bytes, o_.guard ? PROT_NONE : PROT_READ,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    XPYD_CHECK(at != MAP_FAILED, std::strerror(errno));
  }

 private:
  const std::shared_ptr<HostGroups> groups_;
  const PageGroupOptions& o_;
};

Result<std::unique_ptr<VirtualRange>> HostGroups::reserve(size_t bytes) {
  void* at = ::mmap(nullptr, bytes, options_.guard ? PROT_NONE : PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
  if (at == MAP_FAILED) return os_error("reserving " + std::to_string(bytes) + " bytes of addresses");
  return std::unique_ptr<VirtualRange>(std::make_unique<HostRange>(shared_from_this(), at, bytes));
}

}  // namespace

Result<std::shared_ptr<PageGroups>> make_host_page_groups(const PageGroupOptions& o) {
  const size_t page = size_t(::sysconf(_SC_PAGESIZE));
  if (o.group_bytes == 0 || o.group_bytes % page != 0)
    return invalid("page-group-bytes is " + std::to_string(o.group_bytes) + ": expected a multiple of the page, " +
                   std::to_string(page));
  XPYD_CHECK(o.n_groups > 0);
  const size_t bytes = o.group_bytes * size_t(o.n_groups);
  if (Status there = check_available_memory(bytes); !there) return there.error();
  Fd fd(::memfd_create("xpyd-kv", MFD_CLOEXEC));
  if (fd.get() < 0) return os_error("memfd_create");
  // From here on every page exists: map() never waits for memory and cannot run out of it.
  if (const int error = ::posix_fallocate(fd.get(), 0, off_t(bytes)); error != 0) {
    errno = error;
    return os_error("there is no room for " + std::to_string(bytes) + " bytes of page groups");
  }
  return std::shared_ptr<PageGroups>(std::make_shared<HostGroups>(o, std::move(fd)));
}

long max_mappings() {
  long limit = 0;
  if (std::FILE* file = std::fopen("/proc/sys/vm/max_map_count", "r")) {
    if (std::fscanf(file, "%ld", &limit) != 1) limit = 0;
    std::fclose(file);
  }
  return limit;
}

}  // namespace xpyd
