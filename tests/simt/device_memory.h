// Device memory of the interpreter beside Memory::device: what the virtual memory calls
// (vmm_simt.cc) make of it, known to the checks of copies and kernels.
#pragma once

#include <cstddef>
#include <string>

#include "simt.h"

namespace xpyd::cuda::simt {

bool take_device_memory(size_t bytes);  // of what set_device_memory_limit() allows; false: all is taken
void give_device_memory(size_t bytes);
void add_device_range(const std::byte* begin, size_t bytes);
void remove_device_range(const std::byte* begin);
void run_late_work();  // of all streams

// For tests. What the card maps at least, 64 KiB (0: that again), where real ones take 2 MiB.
// Before: nothing is reserved or created.
void set_page_granularity(size_t bytes);
// The n-th of these calls from now on answers with `code` and does nothing.
enum class VmmCall { create, map, set_access };
void fail_vmm_call(VmmCall call, int n, int code);
// Which card vmm::card_identity() says; "GPU-simt" at first.
void set_card_identity(const std::string& text);
// Whether vmm::exports_files() says yes; it does at first.
void set_card_exports(bool on);
// What is live: addresses reserved, physical bytes, mappings.
struct VmmUse {
  size_t reservations = 0, handles = 0, mappings = 0, physical_bytes = 0;
  bool operator==(const VmmUse&) const = default;
};
VmmUse vmm_use();

// For a test's duration.
struct SmallPages {
  SmallPages() { set_page_granularity(4096); }
  ~SmallPages() { set_page_granularity(0); }
};
struct Late {
  explicit Late(bool late) { set_late_streams(late); }
  ~Late() { set_late_streams(false); }
};

}  // namespace xpyd::cuda::simt
