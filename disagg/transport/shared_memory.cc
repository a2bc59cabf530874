#include "disagg/transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "base/memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace xpyd::disagg {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Maps the file at an address that allows huge pages, and touches it, so that no page fault comes later. If the system
// has no more memory, this returns an error instead of a later SIGBUS.
Result<std::shared_ptr<std::byte>> map_touched(int fd, size_t bytes) {
  const size_t reserved = round_up(bytes, kHugePage) + kHugePage;
  void* hole = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (hole == MAP_FAILED) return Error{ErrorCode::unavailable, "mmap: " + os_text()};
  auto* at = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(hole), kHugePage));
  std::shared_ptr<std::byte> memory(at, [hole, reserved](std::byte*) { munmap(hole, reserved); });
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
    return Error{ErrorCode::unavailable, "mmap of shared memory: " + os_text()};
  ask_for_pages(at, bytes);  // most systems give shared memory 4 KiB pages only
  if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return memory;
  if (errno != EINVAL)
    return Error{ErrorCode::unavailable,
                 "there is no memory for " + std::to_string(bytes) + " shared bytes: " + os_text()};
  if (fallocate(fd, 0, 0, off_t(bytes)) != 0)  // kernels before 5.14
    return Error{ErrorCode::unavailable,
                 "there is no memory for " + std::to_string(bytes) + " shared bytes: " + os_text()};
  for (size_t i = 0; i < bytes; i += 4096) *reinterpret_cast<volatile char*>(at + i);
  return memory;
}

// Opens a file of another process that is long enough and sealed.
Result<Fd> open_shared_file(const std::string& name, size_t bytes) {
  if (!name.starts_with("/proc/")) return Error{ErrorCode::io, "the shared memory has no name of a process's file"};
  Fd file(open(name.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) return Error{ErrorCode::io, "the shared memory " + name + ": " + os_text()};
  struct stat status;
  if (fstat(file.get(), &status) != 0 || size_t(status.st_size) < bytes || bytes == 0)
    return Error{ErrorCode::io, "the shared memory is shorter than " + std::to_string(bytes)};
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return Error{ErrorCode::io, "the shared memory is not sealed, so its owner could truncate it"};
  return file;
}

// Keyed by the address of their first byte.
struct Pools {
  struct Pool {
    Fd file;
    size_t bytes = 0;
  };
  std::mutex mutex;
  std::map<uintptr_t, Pool> all;
};

Pools& pools() {
  static Pools* all = new Pools;  // outlives every owner of a pool
  return *all;
}

class SharedDevice final : public Device {
 public:
  const char* name() const override { return cpu_device().name(); }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return shared_pool_memory(bytes); }
  Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) override {
    return cpu_device().make_page_groups(options);
  }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  Result<std::shared_ptr<std::byte>> allocate_host(size_t bytes) override { return cpu_device().allocate_host(bytes); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) override { return cpu_device().make_copy_queue(gbps); }
};

}  // namespace

std::string name_for_others(int fd) { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd); }

Result<std::shared_ptr<std::byte>> make_shared_file(const char* name, size_t bytes, Fd& file) {
  bytes = round_up(std::max<size_t>(bytes, 1), 4096);
  if (Status there = check_available_memory(bytes); !there) return there.error();
  Fd made(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (made.get() < 0) return Error{ErrorCode::unavailable, "memfd_create: " + os_text()};
  if (ftruncate(made.get(), off_t(bytes)) != 0 || fcntl(made.get(), F_ADD_SEALS, kSeals) != 0)
    return Error{ErrorCode::unavailable, "a memfd of " + std::to_string(bytes) + " bytes: " + os_text()};
  auto memory = map_touched(made.get(), bytes);
  if (memory) file = std::move(made);
  return memory;
}

namespace {

std::shared_ptr<std::byte> remembered(std::shared_ptr<std::byte> memory, Fd file, size_t bytes) {
  std::byte* data = memory.get();
  {
    std::lock_guard lock(pools().mutex);
    pools().all[reinterpret_cast<uintptr_t>(data)] = {std::move(file), bytes};
  }
  return std::shared_ptr<std::byte>(data, [mapped = std::move(memory)](std::byte* at) {
    std::lock_guard lock(pools().mutex);
    pools().all.erase(reinterpret_cast<uintptr_t>(at));
  });
}

}  // namespace

Result<std::shared_ptr<std::byte>> shared_pool_memory(size_t bytes) {
  Fd file;
  auto memory = make_shared_file("xpyd-kv", bytes, file);
  if (!memory.ok()) return memory;
  return remembered(std::move(memory).value(), std::move(file), bytes);
}

Result<std::shared_ptr<std::byte>> shared_pool_memory(const std::string& name, size_t bytes) {
  auto opened = open_shared_file(name, bytes);
  if (!opened) return opened.error();
  Fd file = std::move(opened).value();
  auto memory = map_touched(file.get(), bytes);
  if (!memory.ok()) return memory;
  return remembered(std::move(memory).value(), std::move(file), bytes);
}

Device& shared_memory_device() {
  static SharedDevice device;
  return device;
}

Result<SharedFile> shared_file(MemoryRange range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  std::lock_guard lock(pools().mutex);
  auto after = pools().all.upper_bound(begin);
  if (after != pools().all.begin()) {
    const auto& [first, pool] = *std::prev(after);
    const size_t offset = begin - first;
    if (offset <= pool.bytes && range.size() <= pool.bytes - offset)
      return SharedFile{name_for_others(pool.file.get()), offset};
  }
  return invalid("this KV memory cannot be shared with other processes, because it is not in a memfd");
}

Result<std::shared_ptr<std::byte>> map_shared_file(const std::string& name, size_t bytes) {
  auto file = open_shared_file(name, bytes);
  return file ? map_touched(file.value().get(), bytes) : file.error();
}

}  // namespace xpyd::disagg
