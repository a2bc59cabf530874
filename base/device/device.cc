#include "base/device/device.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/job_thread.h"
#include "base/memory.h"

namespace xpyd {
namespace {

void sleep_until(double time_s) {
  const timespec t{time_t(time_s), long((time_s - double(time_t(time_s))) * 1e9)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

void copy_now(std::span<const Copy> copies, bool read_soon) {
  if (!read_soon) return copy_streaming(copies);
  for (const Copy& copy : copies) std::memcpy(copy.destination, copy.source, copy.bytes);
}

// A queue whose own thread makes the copies, so that they overlap with the caller's work, as a GPU's copy engine does.
//
// Thread safety: one owner; reached() and wait() order the copied bytes before what follows them.
class CopyThread final : public DeviceQueue {
 public:
  // `gbps` simulates a link that is slower than this machine's memory, in GB/s; 0: no limit.
  explicit CopyThread(double gbps) : gbps_(gbps) {}
  void copy(std::span<const Copy> copies, bool read_soon) override {
    ++enqueued_;
    thread_.post([this, mine = std::vector<Copy>(copies.begin(), copies.end()), read_soon] {
      run(mine, read_soon);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    });
  }
  int64_t mark() override { return enqueued_; }
  bool reached(int64_t mark) override { return done_.load(std::memory_order_acquire) >= mark; }
  void wait() override { thread_.drain(); }

 private:
  void run(std::span<const Copy> copies, bool read_soon) {
    size_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes;
    RealClock clock;
    const double start = clock.now();
    copy_now(copies, read_soon);
    if (gbps_ <= 0) return;
    link_free_s_ = std::max(link_free_s_, start) + double(bytes) / (gbps_ * 1e9);
    if (link_free_s_ > clock.now()) sleep_until(link_free_s_);
  }

  const double gbps_;
  int64_t enqueued_ = 0;          // jobs; used by the owner
  std::atomic<int64_t> done_{0};  // jobs
  double link_free_s_ = 0;        // used by the thread: when the simulated link is free again
  JobThread thread_;              // last, so that everything enqueued ends first
};

Result<std::shared_ptr<std::byte>> host_memory(size_t bytes) {
  if (Status there = check_available_memory(bytes); !there) return there.error();
  // Only a mapping tells what this process may have of it (ulimit -v).
  void* trial = bytes == 0 ? nullptr : ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (trial == MAP_FAILED)
    return Error{ErrorCode::unavailable, std::to_string(bytes) + " bytes: " + std::strerror(errno) + " (ulimit -v)"};
  if (trial) ::munmap(trial, bytes);
  auto buffer = std::make_shared<Buffer>(bytes);
  return std::shared_ptr<std::byte>(buffer, buffer->data());
}

class CpuQueue final : public DeviceQueue {
 public:
  void copy(std::span<const Copy> copies, bool read_soon) override { copy_now(copies, read_soon); }
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
