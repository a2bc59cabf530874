#include "base/device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/available_memory.h"
#include "base/copy_thread.h"
#include "base/memory.h"

namespace xpyd {
namespace {

Result<std::shared_ptr<std::byte>> host_memory(size_t bytes) {
  if (Status there = check_available_memory(bytes); !there) return there.error();
  // What this process may have of it (ulimit -v) only a mapping tells.
  void* trial = bytes == 0 ? nullptr : ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (trial == MAP_FAILED)
    return Error{ErrorCode::unavailable, std::to_string(bytes) + " bytes: " + std::strerror(errno) + " (ulimit -v)"};
  if (trial) ::munmap(trial, bytes);
  auto buffer = std::make_shared<Buffer>(bytes);
  return std::shared_ptr<std::byte>(buffer, buffer->data());
}

class CpuQueue final : public DeviceQueue {
 public:
  void copy(std::span<const Copy> copies, bool read_soon) override {
    if (!read_soon) return copy_streaming(copies);
    for (const Copy& copy : copies) std::memcpy(copy.destination, copy.source, copy.bytes);
  }
  int64_t mark() override { return 0; }
  bool reached(int64_t) override { return true; }
  void wait() override {}
};

class CpuDevice final : public Device {
 public:
  const char* name() const override { return "cpu"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return host_memory(bytes); }
  Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) override {
    return make_host_page_groups(options);
  }
  std::unique_ptr<DeviceQueue> make_queue(Phase) override { return std::make_unique<CpuQueue>(); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) override { return std::make_unique<CopyThread>(gbps); }
};

}  // namespace

DmaBuf::~DmaBuf() {
  if (fd >= 0) close(fd);
}

DmaBuf& DmaBuf::operator=(DmaBuf&& from) noexcept {
  std::swap(fd, from.fd);
  std::swap(offset, from.offset);
  return *this;
}

Result<std::shared_ptr<std::byte>> Device::allocate_host(size_t bytes) { return host_memory(bytes); }

DeviceQueue& cpu_queue() {
  static CpuQueue queue;
  return queue;
}

Device& cpu_device() {
  static CpuDevice device;
  return device;
}

}  // namespace xpyd
