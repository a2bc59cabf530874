// Implements base/cuda/cuda_vmm.h on the CPU and keeps every rule of the driver. Physical memory is one memfd. Addresses
// are PROT_NONE until memory is mapped there and made accessible. So an access without memory, or after a premature
// unmap, is a segmentation fault here, as it is an illegal access on a GPU. Copies and cp.async report it before
// (cuda_simt.cc).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/cuda/cuda_vmm.h"
#include "device_memory.h"

namespace xpyd::cuda {
namespace {

using vmm::Address;
using vmm::Handle;

constexpr int kInvalidValue = 1;
constexpr size_t kDefaultGranularity = 64 << 10;  // 2 MiB on a GPU; with this, small pools have several rows

struct Physical {
  size_t bytes = 0, file_offset = 0;
  int mapped = 0;
  bool released = false;
};
struct Mapping {
  size_t bytes = 0;
  Handle handle = 0;
  bool accessible = false;
};

struct Vmm {
  std::mutex mutex;
  size_t granularity = kDefaultGranularity;
  int fd = ::memfd_create("xpyd-simt-device", MFD_CLOEXEC);
  size_t file_bytes = 0;
  std::multimap<size_t, size_t> holes;  // of the file: bytes -> offset
  Handle last_handle = 0;
  std::map<Handle, Physical> physical;
  std::map<Address, size_t> reserved;
  std::map<Address, Mapping> mappings;
  struct Planned {
    int calls = 0, code = 0;
  } planned[3];

  Vmm() { XPYD_CHECK(fd >= 0); }
  bool whole(Address address, size_t bytes) const {
    return bytes > 0 && address % granularity == 0 && bytes % granularity == 0;
  }
  // Returns 0 if the call may proceed.
  int planned_failure(simt::VmmCall call) {
    Planned& p = planned[int(call)];
    return p.calls > 0 && --p.calls == 0 ? p.code : 0;
  }
  bool inside_reservation(Address address, size_t bytes) const {
    auto after = reserved.upper_bound(address);
    if (after == reserved.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return address - begin <= size && bytes <= size - (address - begin);
  }
  bool overlaps_mapping(Address address, size_t bytes) const {
    auto next = mappings.lower_bound(address + bytes);
    if (next == mappings.begin()) return false;
    const auto& [begin, mapping] = *std::prev(next);
    return begin + mapping.bytes > address;
  }
  // Returns the mappings that make up the range, or nothing if none do.
  std::vector<Address> exactly(Address address, size_t bytes) const {
    std::vector<Address> found;
    const Address end = address + bytes;
    while (address < end) {
      auto i = mappings.find(address);
      if (i == mappings.end() || i->second.bytes > end - address) return {};
      found.push_back(address);
      address += i->second.bytes;
    }
    return found;
  }
  void drop_if_unused(Handle handle) {
    auto i = physical.find(handle);
    if (!i->second.released || i->second.mapped > 0) return;
    const Physical p = i->second;
    physical.erase(i);
    simt::give_device_memory(p.bytes);
    XPYD_CHECK(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(p.file_offset), off_t(p.bytes)) == 0);
    holes.emplace(p.bytes, p.file_offset);
  }
};
Vmm& state() {
  static Vmm instance;
  return instance;
}

std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(address); }
void protect(Address address, size_t bytes) {
  void* at = ::mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  XPYD_CHECK(at != MAP_FAILED);
}

}  // namespace

namespace simt {

void set_page_granularity(size_t bytes) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  XPYD_CHECK(v.reserved.empty() && v.physical.empty());
  v.granularity = bytes ? bytes : kDefaultGranularity;
}
void fail_vmm_call(VmmCall call, int n, int code) {
  std::lock_guard lock(state().mutex);
  state().planned[int(call)] = {n, code};
}
VmmUse vmm_use() {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  VmmUse use{v.reserved.size(), v.physical.size(), v.mappings.size(), 0};
  for (const auto& [handle, p] : v.physical) use.physical_bytes += p.bytes;
  return use;
}

}  // namespace simt

namespace vmm {

int export_dma_buf(int*, Address, size_t) { return 801; }  // no device to export to

Status available() { return ok(); }
size_t granularity() {
  std::lock_guard lock(state().mutex);
  return state().granularity;
}

int address_reserve(Address* address, size_t bytes) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  if (!v.whole(0, bytes)) return kInvalidValue;
  const size_t room = bytes + v.granularity;
  void* at = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return kOutOfMemory;
  const Address begin = reinterpret_cast<Address>(at),
                aligned = (begin + v.granularity - 1) / v.granularity * v.granularity;
  if (aligned > begin) ::munmap(at, aligned - begin);
  ::munmap(pointer(aligned + bytes), begin + room - aligned - bytes);
  v.reserved[aligned] = bytes;
  *address = aligned;
  return 0;
}

int address_free(Address address, size_t bytes) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  auto i = v.reserved.find(address);
  if (i == v.reserved.end() || i->second != bytes || v.overlaps_mapping(address, bytes)) return kInvalidValue;
  ::munmap(pointer(address), bytes);
  v.reserved.erase(i);
  return 0;
}

int create(Handle* handle, size_t bytes) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  if (!v.whole(0, bytes)) return kInvalidValue;
  if (const int code = v.planned_failure(simt::VmmCall::create)) return code;
  if (!simt::take_device_memory(bytes)) return kOutOfMemory;
  size_t offset = v.file_bytes;
  if (auto hole = v.holes.find(bytes); hole != v.holes.end()) {
    offset = hole->second;
    v.holes.erase(hole);
  } else {
    v.file_bytes += bytes;
    XPYD_CHECK(::ftruncate(v.fd, off_t(v.file_bytes)) == 0);
  }
  // New device memory is NaN.
  static const std::vector<unsigned char> ones(64 << 10, 0xff);
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(v.fd, ones.data(), std::min(ones.size(), bytes - done), off_t(offset + done));
    XPYD_CHECK(n > 0);
    done += size_t(n);
  }
  v.physical[++v.last_handle] = {bytes, offset};
  *handle = v.last_handle;
  return 0;
}

int release(Handle handle) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  auto i = v.physical.find(handle);
  if (i == v.physical.end() || i->second.released) return kInvalidValue;
  i->second.released = true;
  v.drop_if_unused(handle);
  return 0;
}

int map(Address address, size_t bytes, Handle handle) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  auto i = v.physical.find(handle);
  if (i == v.physical.end() || i->second.released || i->second.bytes != bytes || !v.whole(address, bytes) ||
      !v.inside_reservation(address, bytes) || v.overlaps_mapping(address, bytes))
    return kInvalidValue;
  if (const int code = v.planned_failure(simt::VmmCall::map)) return code;
  ++i->second.mapped;
  v.mappings[address] = {bytes, handle};
  return 0;
}

int set_access(Address address, size_t bytes) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  const std::vector<Address> parts = v.exactly(address, bytes);
  if (parts.empty()) return kInvalidValue;
  if (const int code = v.planned_failure(simt::VmmCall::set_access)) return code;
  for (Address part : parts) {
    Mapping& mapping = v.mappings[part];
    if (std::exchange(mapping.accessible, true)) continue;
    const Physical& p = v.physical[mapping.handle];
    void* at = ::mmap(pointer(part), mapping.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, v.fd,
                      off_t(p.file_offset));
    XPYD_CHECK(at != MAP_FAILED, "the interpreter is out of mappings");
    simt::add_device_range(pointer(part), mapping.bytes);
  }
  return 0;
}

int unmap(Address address, size_t bytes) {
  Vmm& v = state();
  std::lock_guard lock(v.mutex);
  const std::vector<Address> parts = v.exactly(address, bytes);
  if (parts.empty()) return kInvalidValue;
  for (Address part : parts) {
    const Mapping mapping = v.mappings[part];
    v.mappings.erase(part);
    if (mapping.accessible) simt::remove_device_range(pointer(part));
    --v.physical[mapping.handle].mapped;
    v.drop_if_unused(mapping.handle);
  }
  protect(address, bytes);
  return 0;
}

std::string code_name(int code) {
  return code == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
         : code == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
         : code == kNotReady     ? "CUDA_ERROR_NOT_READY"
                                 : "error " + std::to_string(code);
}

void wait_for_card() {
  const std::lock_guard no_capture(capturing());
  simt::run_late_work();
}

}  // namespace vmm
}  // namespace xpyd::cuda
