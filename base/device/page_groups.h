// Physical memory in equal page groups, which a program maps to parts of virtual ranges while it runs (vAttention,
// ASPLOS'25, section 5: cuMemCreate / cuMemMap / cuMemUnmap). On the CPU this is one memfd and mmap(MAP_FIXED)
// (base/device/page_groups.cc), on a card the driver's calls (base/device/page_groups_cuda.cu).
#pragma once

#include <cstddef>
#include <memory>

#include "base/status.h"

namespace xpyd {

struct PageGroupOptions {
  size_t group_bytes = 0;  // a multiple of the device's page
  int n_groups = 0;
  double call_us = 0;  // on the host: microseconds added to every map and unmap, to simulate another device
  // If true, an access to an unmapped part of a range ends the program. If false, unmapped parts read as zeros, so that
  // a kernel may look past a sequence's end and ignore what it read. On a card it is always true, because kernels there
  // do not look past the end.
  bool guard = false;
};

// Addresses [data(), data() + bytes()). Requires that no running work uses a part that is unmapped or mapped anew. The
// destructor unmaps all; on a card it first waits for all work. Thread safety: threads may use different parts.
class VirtualRange {
 public:
  virtual ~VirtualRange() = default;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Maps groups [group, group + n) to [offset, offset + n * group_bytes), which must be unmapped. Error `unavailable`:
  // the system refuses (a limit of mappings), and nothing has changed.
  virtual Status map(size_t offset, int group, int n) = 0;
  virtual void unmap(size_t offset, int n) = 0;  // unmaps what of it is mapped

 protected:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// All groups exist from the start, unmapped; a range keeps them, and the last owner frees them. A group keeps its bytes
// while it is unmapped. Thread safety: any thread.
class PageGroups {
 public:
  explicit PageGroups(const PageGroupOptions& options) : options_(options) {}
  virtual ~PageGroups() = default;
  const PageGroupOptions& options() const { return options_; }
  virtual Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) = 0;

 protected:
  const PageGroupOptions options_;
};

// Makes the CPU's page groups. Errors `unavailable`: not enough memory; `invalid_argument`: group_bytes is not a
// multiple of the page.
Result<std::shared_ptr<PageGroups>> make_host_page_groups(const PageGroupOptions& options);
// The number of mappings that one process may have (vm.max_map_count); 0 if no limit is known.
long max_mappings();

}  // namespace xpyd
