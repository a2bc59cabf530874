// Device memory of the interpreter beside Memory::device: memory of the virtual memory calls (vmm_simt.cc), registered
// for the checks of copies and kernels.
#pragma once

#include <cstddef>
#include <string>

#include "simt.h"

namespace xpyd::cuda::simt {

bool take_device_memory(size_t bytes);  // counts against set_device_memory_limit(); false: none is left
void give_device_memory(size_t bytes);
void add_device_range(const std::byte* begin, size_t bytes);
void remove_device_range(const std::byte* begin);
void run_late_work();  // runs the kept work of all streams

// For tests. Sets the mapping granularity: 64 KiB by default (0 restores it), where real devices have 2 MiB. Requires
// that nothing is reserved or created.
void set_page_granularity(size_t bytes);
// The n-th such call from now on returns `code` and does nothing.
enum class VmmCall { create, map, set_access };
void fail_vmm_call(VmmCall call, int n, int code);
// Live resources: reserved addresses, physical bytes and mappings.
struct VmmUse {
  size_t reservations = 0, handles = 0, mappings = 0, physical_bytes = 0;
  bool operator==(const VmmUse&) const = default;
};
VmmUse vmm_use();

// Set for the duration of a test.
struct SmallPages {
  SmallPages() { set_page_granularity(4096); }
  ~SmallPages() { set_page_granularity(0); }
};
struct Late {
  explicit Late(bool late) { set_late_streams(late); }
  ~Late() { set_late_streams(false); }
};

}  // namespace xpyd::cuda::simt
