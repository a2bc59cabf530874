#include "base/device/page_groups.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "base/memory.h"
#include "base/os.h"

namespace xpyd {
namespace {

// Groups of whole huge pages are huge pages in memory if the system allows them for shared memory
// (transparent_hugepage/shmem_enabled: advise, always). One entry of the page table then maps each.
bool whole_huge_pages(const PageGroupOptions& o) { return o.group_bytes % kHugePage == 0; }

Error os_error(const std::string& what) { return {ErrorCode::unavailable, what + ": " + std::strerror(errno)}; }

class HostGroups final : public PageGroups, public std::enable_shared_from_this<HostGroups> {
 public:
  HostGroups(const PageGroupOptions& options, Fd fd) : PageGroups(options), fd_(std::move(fd)) {}
  Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override;
  int fd() const { return fd_.get(); }
  // True if the process may have one more mapping. Beyond its limit the kernel refuses every mmap, also those of
  // unmap() and malloc(), so the last mappings are left to them.
  bool room_for_mapping();

 private:
  const Fd fd_;
  std::mutex mutex_;
  long left_ = 0;  // calls before mappings must be counted again
};

class HostRange final : public VirtualRange {
 public:
  // The range owns [at, at + reserved); the part that is used is aligned as groups are.
  HostRange(std::shared_ptr<HostGroups> groups, void* at, size_t reserved, size_t bytes)
      : groups_(std::move(groups)), o_(groups_->options()), at_(at), reserved_(reserved) {
    const size_t slack = whole_huge_pages(o_) ? -reinterpret_cast<uintptr_t>(at) % kHugePage : 0;
    data_ = static_cast<std::byte*>(at) + slack;
    bytes_ = bytes;
  }
  ~HostRange() override { ::munmap(at_, reserved_); }

  // MAP_POPULATE: the caller of map() pays for the page tables, and no kernel ever faults.
  Status map(size_t offset, int group, int n) override {
    const size_t bytes = size_t(n) * o_.group_bytes;
    XPYD_CHECK(offset + bytes <= bytes_ && group >= 0 && group + n <= o_.n_groups);
    if (!groups_->room_for_mapping())
      return Error{ErrorCode::unavailable,
                   "no mappings are left: vm.max_map_count is " + std::to_string(max_mappings())};
    occupy(o_.call_us);
    void* at = ::mmap(data_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                      groups_->fd(), off_t(size_t(group) * o_.group_bytes));
    if (at != MAP_FAILED) {
      calls.maps.fetch_add(1, std::memory_order_relaxed);
      return ok();
    }
    return os_error("mmap of a page group");
  }

  // mmap and not munmap, because another thread could be given the hole.
  void unmap(size_t offset, int n) override {
    const size_t bytes = size_t(n) * o_.group_bytes;
    XPYD_CHECK(offset + bytes <= bytes_);
    occupy(o_.call_us);
    void* at = ::mmap(data_ + offset, bytes, o_.guard ? PROT_NONE : PROT_READ,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    XPYD_CHECK(at != MAP_FAILED, std::strerror(errno));
    calls.unmaps.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<HostGroups> groups_;
  const PageGroupOptions& o_;
  void* const at_;
  const size_t reserved_;
};

// The number of mappings of this process; 0 if unknown.
long count_mappings() {
  long lines = 0;
  if (std::FILE* file = std::fopen("/proc/self/maps", "r")) {
    for (int c; (c = ::getc_unlocked(file)) != EOF;) lines += c == '\n';
    std::fclose(file);
  }
  return lines;
}

bool HostGroups::room_for_mapping() {
  std::lock_guard lock(mutex_);
  if (left_ > 0) return left_--, true;
  const long limit = max_mappings(), spare = limit - limit / 32 - count_mappings();
  if (limit > 0 && spare <= 0) return false;
  left_ = limit > 0 ? spare / 4 : 1 << 30;  // a map makes up to two mappings; other ranges make some, too
  return true;
}

Result<std::unique_ptr<VirtualRange>> HostGroups::reserve(size_t bytes) {
  const size_t reserved = bytes + (whole_huge_pages(options_) ? kHugePage : 0);
  void* at = ::mmap(nullptr, reserved, options_.guard ? PROT_NONE : PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return os_error("reserving " + std::to_string(bytes) + " bytes of addresses");
  return std::unique_ptr<VirtualRange>(std::make_unique<HostRange>(shared_from_this(), at, reserved, bytes));
}

// A hint to the kernel. Memory that gets no huge page is in small pages, or does not exist yet.
void ask_for_huge_pages(int fd, size_t bytes) {
  if (::ftruncate(fd, off_t(bytes)) != 0) return;
  void* at = ::mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return;
  std::byte* aligned = static_cast<std::byte*>(at) - reinterpret_cast<uintptr_t>(at) % kHugePage + kHugePage;
  if (::mmap(aligned, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED &&
      ::madvise(aligned, bytes, MADV_HUGEPAGE) == 0)
    (void)::madvise(aligned, bytes, MADV_POPULATE_WRITE);
  ::munmap(at, bytes + kHugePage);
}

}  // namespace

void occupy(double us) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double, std::micro>(us);
  while (us > 0 && std::chrono::steady_clock::now() < end) {
  }
}

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
  auto groups = std::make_shared<HostGroups>(o, std::move(fd));
  if (whole_huge_pages(o) && huge_pages() == HugePages::transparent) ask_for_huge_pages(groups->fd(), bytes);
  // From here on every page exists: map() never waits for memory and cannot run out of it.
  const int error = ::posix_fallocate(groups->fd(), 0, off_t(bytes));
  if (error != 0) {
    errno = error;
    return os_error("there is no room for " + std::to_string(bytes) + " bytes of page groups");
  }
  return std::shared_ptr<PageGroups>(std::move(groups));
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
