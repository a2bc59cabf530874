// A card's memory for other processes (MemoryExporter, base/device.h):
// one physical allocation (cuMemCreate, of the handle type that a file descriptor can stand for),
// mapped whole by each process at an address of its own. cudaMalloc's memory goes to other
// processes too (cudaIpcGetMemHandle), but as bytes that any process which learns them can open,
// and it is freed with the process that made it; a descriptor goes to whom it is sent, and keeps
// the memory.
#include <fcntl.h>

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/cuda_vmm.h"
#include "base/device_cuda.h"

namespace xpyd {
namespace {

using namespace cuda;

constexpr double kBusySeconds = 5;

void must(int code, const char* call) { XPYD_CHECK(code == 0, std::string(call) + ": " + vmm::code_name(code)); }
Error refused(int code, const char* call, size_t bytes) {
  return {code == vmm::kOutOfMemory ? ErrorCode::unavailable : ErrorCode::io,
          std::to_string(bytes) + " bytes of the card for processes: " + call + ": " + vmm::code_name(code)};
}

// Physical memory behind addresses. Gives back what it came to have.
class Mapping {
 public:
  Mapping(vmm::Handle handle, size_t bytes) : handle_(handle), bytes_(bytes) {}
  Mapping(const Mapping&) = delete;
  ~Mapping() {
    if (mapped_) {
      vmm::wait_for_card();  // as cudaFree does
      must(vmm::unmap(at_, bytes_), "cuMemUnmap");
    }
    if (at_) must(vmm::address_free(at_, bytes_), "cuMemAddressFree");
    must(vmm::release(handle_), "cuMemRelease");
  }
  Status map() {
    if (const int code = vmm::address_reserve(&at_, bytes_)) return refused(code, "cuMemAddressReserve", bytes_);
    if (const int code = vmm::map(at_, bytes_, handle_)) return refused(code, "cuMemMap", bytes_);
    mapped_ = true;
    if (const int code = set_access()) return refused(code, "cuMemSetAccess", bytes_);
    return ok();
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(at_); }

 private:
  // A card at work may not be ready at once, and nobody would ask again.
  int set_access() {
    RealClock clock;
    for (const double end = clock.now() + kBusySeconds;; clock.sleep(1e-3)) {
      const int code = vmm::set_access(at_, bytes_);
      if (code != vmm::kNotReady || clock.now() >= end) return code;
    }
  }

  const vmm::Handle handle_;
  const size_t bytes_;
  vmm::Address at_ = 0;
  bool mapped_ = false;
};

size_t round_up(size_t bytes) {
  const size_t unit = vmm::granularity();
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Result<std::shared_ptr<std::byte>> make_cuda_exported(size_t bytes, int& file) {
  file = -1;
  const size_t whole = round_up(bytes);
  vmm::Handle handle = 0;
  if (const int code = vmm::create(&handle, whole, vmm::Export::file)) return refused(code, "cuMemCreate", whole);
  auto mapping = std::make_shared<Mapping>(handle, whole);
  if (Status mapped = mapping->map(); !mapped) return mapped.error();
  Stream stream;
  fill(mapping->data(), 0, whole, stream);
  stream.wait();
  if (const int code = vmm::export_file(&file, handle)) return refused(code, "cuMemExportToShareableHandle", whole);
  XPYD_CHECK(::fcntl(file, F_SETFD, FD_CLOEXEC) == 0);  // the driver says nothing of it
  return std::shared_ptr<std::byte>(mapping, mapping->data());
}

Result<std::shared_ptr<std::byte>> import_cuda_memory(int file, size_t bytes) {
  const size_t whole = round_up(bytes);
  vmm::Handle handle = 0;
  if (const int code = vmm::import_file(&handle, file)) return refused(code, "cuMemImportFromShareableHandle", whole);
  auto mapping = std::make_shared<Mapping>(handle, whole);
  if (Status mapped = mapping->map(); !mapped) return mapped.error();
  return std::shared_ptr<std::byte>(mapping, mapping->data());
}

}  // namespace xpyd
