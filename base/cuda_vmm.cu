#include <cuda.h>

#include <cstdint>
#include <cstdio>

#include "base/cuda.h"
#include "base/cuda_driver.h"
#include "base/cuda_vmm.h"

namespace xpyd::cuda::vmm {
namespace {

constexpr int kCard = 0;

struct Driver {
  CUresult (*attribute)(int*, CUdevice_attribute, CUdevice) = nullptr;
  CUresult (*granularity)(size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) = nullptr;
  CUresult (*reserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long) = nullptr;
  CUresult (*free)(CUdeviceptr, size_t) = nullptr;
  CUresult (*create)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long) = nullptr;
  CUresult (*release)(CUmemGenericAllocationHandle) = nullptr;
  CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) = nullptr;
  CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) = nullptr;
  CUresult (*unmap)(CUdeviceptr, size_t) = nullptr;
  CUresult (*error_name)(CUresult, const char**) = nullptr;
  CUresult (*export_handle)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                            unsigned long long) = nullptr;
  CUresult (*import_handle)(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) = nullptr;
  const char* missing = nullptr;

  Driver() {
    constexpr unsigned kSince = 10020;
    auto need = [this](auto& function, const char* name) {
      if (!look_up(function, name, kSince) && !missing) missing = name;
    };
    need(attribute, "cuDeviceGetAttribute");
    need(granularity, "cuMemGetAllocationGranularity");
    need(reserve, "cuMemAddressReserve");
    need(free, "cuMemAddressFree");
    need(create, "cuMemCreate");
    need(release, "cuMemRelease");
    need(map, "cuMemMap");
    need(set_access, "cuMemSetAccess");
    need(unmap, "cuMemUnmap");
    need(error_name, "cuGetErrorName");
    need(export_handle, "cuMemExportToShareableHandle");
    need(import_handle, "cuMemImportFromShareableHandle");
  }
};

const Driver& driver() {
  static const Driver found;
  // The driver's calls want a context, which a new thread does not have (a mapper's thread).
  thread_local const bool bound = cudaSetDevice(kCard) == cudaSuccess;
  XPYD_CHECK(bound, "cudaSetDevice");
  return found;
}

CUmemAllocationProp on_card(Export to = Export::none) {
  // A network card reaches such memory (export_dma_buf) only where it was made for that.
  static const bool rdma = [] {
    int supported = 0;
    return driver().attribute(&supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, kCard) ==
               CUDA_SUCCESS &&
           supported;
  }();
  CUmemAllocationProp properties{};
  properties.allocFlags.gpuDirectRDMACapable = rdma;
  if (to == Export::file) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = kCard;
  return properties;
}

}  // namespace

Status available() {
  const Driver& d = driver();
  if (d.missing)
    return Error{ErrorCode::unavailable, std::string("page groups on CUDA: the driver has no ") + d.missing};
  int supported = 0;
  const CUresult r = d.attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, kCard);
  if (r != CUDA_SUCCESS || !supported)
    return Error{ErrorCode::unavailable,
                 "page groups on CUDA: this card has no virtual memory "
                 "management (cuMemCreate, cuMemMap)"};
  return ok();
}

size_t granularity() {
  static const size_t bytes = [] {
    const CUmemAllocationProp properties = on_card();
    size_t found = 0;
    const CUresult r = driver().granularity(&found, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    XPYD_CHECK(r == CUDA_SUCCESS && found > 0, "cuMemGetAllocationGranularity: " + code_name(int(r)));
    return found;
  }();
  return bytes;
}

int export_dma_buf(int* file, Address address, size_t bytes) {
  using Export = CUresult (*)(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
  static const Export call = [] {
    Export found = nullptr;
    return look_up(found, "cuMemGetHandleForAddressRange", 11070) ? found : nullptr;
  }();
  int supported = 0;
  const CUresult asked = driver().attribute(&supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, kCard);
  if (!call || asked != CUDA_SUCCESS || !supported) return CUDA_ERROR_NOT_SUPPORTED;
  return call(file, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}

int address_reserve(Address* address, size_t bytes) {
  CUdeviceptr at = 0;
  const CUresult r = driver().reserve(&at, bytes, 0, 0, 0);
  *address = at;
  return int(r);
}
int address_free(Address address, size_t bytes) { return int(driver().free(address, bytes)); }

int create(Handle* handle, size_t bytes, Export to) {
  const CUmemAllocationProp properties = on_card(to);
  CUmemGenericAllocationHandle made = 0;
  const CUresult r = driver().create(&made, bytes, &properties, 0);
  *handle = made;
  return int(r);
}
int release(Handle handle) { return int(driver().release(handle)); }

int map(Address address, size_t bytes, Handle handle) { return int(driver().map(address, bytes, 0, handle, 0)); }
int set_access(Address address, size_t bytes) {
  CUmemAccessDesc access{};
  access.location = on_card().location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return int(driver().set_access(address, bytes, &access, 1));
}
int unmap(Address address, size_t bytes) { return int(driver().unmap(address, bytes)); }

Status exports_files() {
  if (Status there = available(); !there) return there;
  int supported = 0;
  const CUresult r = driver().attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                        kCard);
  if (r != CUDA_SUCCESS || !supported)
    return Error{ErrorCode::unavailable,
                 "this card's memory cannot be shared by file descriptor (the driver's "
                 "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED says so)"};
  return ok();
}

int export_file(int* file, Handle handle) {
  return int(driver().export_handle(file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

int import_file(Handle* handle, int file) {
  CUmemGenericAllocationHandle found = 0;
  // The descriptor itself goes where an address is expected.
  const CUresult r = driver().import_handle(&found, reinterpret_cast<void*>(intptr_t(file)),
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  *handle = found;
  return int(r);
}

std::string card_identity() {
  (void)driver();
  cudaDeviceProp properties{};
  const cudaError_t r = cudaGetDeviceProperties(&properties, kCard);
  XPYD_CHECK(r == cudaSuccess, std::string("cudaGetDeviceProperties: ") + cudaGetErrorString(r));
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char hex[4];
    std::snprintf(hex, sizeof hex, "%02x", unsigned(uint8_t(properties.uuid.bytes[i])));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += hex;
  }
  return text;
}

std::string code_name(int code) {
  const char* name = nullptr;
  if (driver().error_name(CUresult(code), &name) != CUDA_SUCCESS || !name) return "error " + std::to_string(code);
  return name;
}

void wait_for_card() {
  const std::lock_guard no_capture(capturing());
  const cudaError_t r = cudaDeviceSynchronize();
  XPYD_CHECK(r == cudaSuccess, std::string("cudaDeviceSynchronize: ") + cudaGetErrorString(r));
}

}  // namespace xpyd::cuda::vmm
