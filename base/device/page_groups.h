// Physical memory in equal page groups, which a program puts behind parts of virtual ranges while
// it runs (vAttention, ASPLOS'25, section 5: cuMemCreate / cuMemMap / cuMemUnmap). On the CPU one
// memfd and mmap(MAP_FIXED): base/device/page_groups.cc; on a card the driver's calls:
// base/device/page_groups_cuda.cu.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace xpyd {

struct PageGroupOptions {
  size_t group_bytes = 0;  // a multiple of the device's page
  int n_groups = 0;
  double call_us = 0;  // every map and unmap takes this much longer: another device's latency
  // Unmapped parts of a range stop the program that touches them. Off: they read as zeros, so that
  // a kernel may look past a sequence's end and drop what it saw. On a card always on: its kernels
  // look at no token that their sequence has not.
  bool guard = false;
};

// Cumulative, of one range: calls of the system.
struct PageCalls {
  std::atomic<int64_t> maps{0}, unmaps{0};
};

// Addresses [data, data + bytes). Nothing that may still run uses what is unmapped, or mapped anew.
// Thread safety: different parts by different threads.
class VirtualRange {
 public:
  virtual ~VirtualRange() = default;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Puts groups [group, group + n) behind [offset, offset + n * group_bytes), where nothing is.
  // Error `unavailable`: the system refuses (a limit of mappings), and nothing has changed.
  virtual Status map(size_t offset, int group, int n) = 0;
  virtual void unmap(size_t offset, int n) = 0;  // what of it is mapped
  PageCalls calls;

 protected:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// All groups exist from the start, unmapped; the last owner frees them. Thread safety: any thread.
class PageGroups {
 public:
  explicit PageGroups(const PageGroupOptions& options) : options_(options) {}
  virtual ~PageGroups() = default;
  const PageGroupOptions& options() const { return options_; }
  virtual Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) = 0;

 protected:
  const PageGroupOptions options_;
};

// PageGroupOptions::call_us: a driver's call occupies the thread that makes it.
void occupy(double us);

// The CPU's. Error `unavailable`: not that much memory; `invalid_argument`: group_bytes is no multiple of the page.
Result<std::shared_ptr<PageGroups>> make_host_page_groups(const PageGroupOptions& options);
// Mappings that one process may have (vm.max_map_count); 0: no limit is known.
long max_mappings();

}  // namespace xpyd
