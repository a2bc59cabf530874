// Calls that only the driver (libcuda) has: virtual memory (base/cuda/cuda_vmm.h), green contexts and tensor maps
// (base/cuda/cuda.h). Its functions are looked up at run time, so that the program starts without a driver and can
// report it.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "base/cuda/cuda_vmm.h"

namespace xpyd::cuda {
namespace {

// The driver's function of this name, or null. `since` is the CUDA release whose signature it has, such as 12000.
template <class F>
F* look_up(const char* name, unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state{};
#if CUDART_VERSION >= 12050
  cudaError_t result = cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &state);
#else
  (void)since;
  cudaError_t result = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &state);
#endif
  return result == cudaSuccess && state == cudaDriverEntryPointSuccess ? reinterpret_cast<F*>(found) : nullptr;
}
// The function as <cuda.h> declares it, looked up once.
#define DRIVER(name, since)                                             \
  ([] {                                                                 \
    static auto* const found = look_up<decltype(::name)>(#name, since); \
    return found;                                                       \
  }())

std::string failed(const char* call, CUresult code) {
  return std::string(call) + " failed: error " + std::to_string(int(code));
}

// ---- green contexts

class GreenSplit final : public Split {
 public:
  ~GreenSplit() override {
    for (CUgreenCtx part : parts_)
      if (part) DRIVER(cuGreenCtxDestroy, kSince)(part);
  }
  static bool there() {
    return DRIVER(cuDeviceGetDevResource, kSince) && DRIVER(cuDevSmResourceSplitByCount, kSince) &&
           DRIVER(cuDevResourceGenerateDesc, kSince) && DRIVER(cuGreenCtxCreate, kSince) &&
           DRIVER(cuGreenCtxDestroy, kSince) && DRIVER(cuGreenCtxStreamCreate, kSince);
  }
  // Returns the failed call with its code, or "".
  std::string cut(int n_sms) {
    CUdevResource all{}, group[2] = {};
    unsigned n_groups = 1;
    if (CUresult r = DRIVER(cuDeviceGetDevResource, kSince)(0, &all, CU_DEV_RESOURCE_TYPE_SM); r != CUDA_SUCCESS)
      return failed("cuDeviceGetDevResource", r);
    if (CUresult r = DRIVER(cuDevSmResourceSplitByCount, kSince)(&group[0], &n_groups, &all, &group[1], 0,
                                                                 unsigned(n_sms));
        r != CUDA_SUCCESS || n_groups != 1)
      return failed("cuDevSmResourceSplitByCount", r);
    for (int part = 0; part < 2; ++part) {
      n_sms_[part] = int(group[part].sm.smCount);
      if (n_sms_[part] == 0) return "part " + std::to_string(part) + " would get no SM";
      CUdevResourceDesc description{};
      if (CUresult r = DRIVER(cuDevResourceGenerateDesc, kSince)(&description, &group[part], 1); r != CUDA_SUCCESS)
        return failed("cuDevResourceGenerateDesc", r);
      if (CUresult r = DRIVER(cuGreenCtxCreate, kSince)(&parts_[part], description, 0, CU_GREEN_CTX_DEFAULT_STREAM);
          r != CUDA_SUCCESS)
        return failed("cuGreenCtxCreate", r);
    }
    return "";
  }
  int n_sms(int part) const override { return n_sms_[part]; }
  cudaStream_t make_stream(int part, bool high_priority) override {
    int least = 0, greatest = 0;
    XPYD_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess);
    CUstream stream = nullptr;
    CUresult made = DRIVER(cuGreenCtxStreamCreate, kSince)(&stream, parts_[part], CU_STREAM_NON_BLOCKING,
                                                           high_priority ? greatest : least);
    XPYD_CHECK(made == CUDA_SUCCESS, failed("cuGreenCtxStreamCreate", made));
    return stream;
  }

 private:
  static constexpr unsigned kSince = 12050;
  CUgreenCtx parts_[2] = {};
  int n_sms_[2] = {};
};

}  // namespace

int Split::n_sms_of(const Stream& stream) {
  auto* const green = DRIVER(cuStreamGetGreenCtx, 12040);
  auto* const resource = DRIVER(cuGreenCtxGetDevResource, 12040);
  CUgreenCtx part = nullptr;
  CUdevResource sms{};
  if (!green || !resource || green(stream.handle(), &part) != CUDA_SUCCESS || !part ||
      resource(part, &sms, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS)
    return 0;
  return int(sms.sm.smCount);
}

Result<std::unique_ptr<Split>> Split::cut(const Card& card, int n_sms) {
  if (n_sms < 1 || n_sms >= card.n_sms)
    return invalid("--gpu-split " + std::to_string(n_sms) + ": " + card.name + " has " + std::to_string(card.n_sms) +
                   " SMs; expected a number that leaves SMs for both parts");
  if (!GreenSplit::there())
    return Error{ErrorCode::unavailable, "--gpu-split: green contexts need a driver for CUDA 12.5 or later"};
  auto split = std::make_unique<GreenSplit>();
  if (std::string wrong = split->cut(n_sms); !wrong.empty())
    return Error{ErrorCode::unavailable, "--gpu-split " + std::to_string(n_sms) + ": " + wrong};
  return Result<std::unique_ptr<Split>>(std::move(split));
}

// ---- tensor maps

TensorMap make_tensor_map(const BoxedMatrix& matrix) {
  auto* const encode = DRIVER(cuTensorMapEncodeTiled, 12000);
  XPYD_CHECK(encode, "cuTensorMapEncodeTiled: the driver does not have this function");
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static_assert(alignof(TensorMap) >= alignof(CUtensorMap));
  const cuuint64_t sizes[] = {matrix.columns, matrix.rows}, strides[] = {matrix.row_stride};
  const cuuint32_t box[] = {cuuint32_t(kBoxColumns), cuuint32_t(matrix.box_rows)};
  const cuuint32_t every[] = {1, 1};
  CUtensorMap encoded;
  CUresult result = encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes,
                           strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  XPYD_CHECK(result == CUDA_SUCCESS, failed("cuTensorMapEncodeTiled", result));
  TensorMap map;
  std::memcpy(&map, &encoded, sizeof map);
  return map;
}

// ---- virtual memory

namespace vmm {
namespace {

constexpr int kCard = 0;
#define VMM(name) (bind(), DRIVER(name, 10020))

// The driver's calls need a context, which a new thread (a mapper's) does not have.
void bind() {
  thread_local const bool bound = cudaSetDevice(kCard) == cudaSuccess;
  XPYD_CHECK(bound, "cudaSetDevice");
}

bool has(CUdevice_attribute what) {
  int value = 0;
  return VMM(cuDeviceGetAttribute)(&value, what, kCard) == CUDA_SUCCESS && value;
}

CUmemAllocationProp on_card() {
  // A network card reaches this memory (export_dma_buf) only if it was created for that.
  static const bool rdma = has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  CUmemAllocationProp properties{};
  properties.allocFlags.gpuDirectRDMACapable = rdma;
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = kCard;
  return properties;
}

}  // namespace

Status available() {
#define NAMED(name) \
  { #name, VMM(name) != nullptr }
  const std::pair<const char*, bool> needed[] = {NAMED(cuDeviceGetAttribute),
                                                 NAMED(cuMemGetAllocationGranularity),
                                                 NAMED(cuMemAddressReserve),
                                                 NAMED(cuMemAddressFree),
                                                 NAMED(cuMemCreate),
                                                 NAMED(cuMemRelease),
                                                 NAMED(cuMemMap),
                                                 NAMED(cuMemSetAccess),
                                                 NAMED(cuMemUnmap),
                                                 NAMED(cuGetErrorName)};
  for (const auto& [name, there] : needed)
    if (!there) return Error{ErrorCode::unavailable, std::string("page groups on CUDA: the driver has no ") + name};
  if (!has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
    return Error{ErrorCode::unavailable,
                 "page groups on CUDA: this card has no virtual memory management (cuMemCreate, cuMemMap)"};
  return ok();
}

size_t granularity() {
  static const size_t bytes = [] {
    const CUmemAllocationProp properties = on_card();
    size_t found = 0;
    const CUresult r = VMM(cuMemGetAllocationGranularity)(&found, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    XPYD_CHECK(r == CUDA_SUCCESS && found > 0, "cuMemGetAllocationGranularity: " + code_name(int(r)));
    return found;
  }();
  return bytes;
}

int export_dma_buf(int* file, Address address, size_t bytes) {
  auto* const call = DRIVER(cuMemGetHandleForAddressRange, 11070);
  if (!call || !has(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)) return CUDA_ERROR_NOT_SUPPORTED;
  return call(file, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}

int address_reserve(Address* address, size_t bytes) {
  CUdeviceptr at = 0;
  const CUresult r = VMM(cuMemAddressReserve)(&at, bytes, 0, 0, 0);
  *address = at;
  return int(r);
}
int address_free(Address address, size_t bytes) { return int(VMM(cuMemAddressFree)(address, bytes)); }

int create(Handle* handle, size_t bytes) {
  const CUmemAllocationProp properties = on_card();
  CUmemGenericAllocationHandle made = 0;
  const CUresult r = VMM(cuMemCreate)(&made, bytes, &properties, 0);
  *handle = made;
  return int(r);
}
int release(Handle handle) { return int(VMM(cuMemRelease)(handle)); }

int map(Address address, size_t bytes, Handle handle) { return int(VMM(cuMemMap)(address, bytes, 0, handle, 0)); }
int set_access(Address address, size_t bytes) {
  CUmemAccessDesc access{};
  access.location = on_card().location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return int(VMM(cuMemSetAccess)(address, bytes, &access, 1));
}
int unmap(Address address, size_t bytes) { return int(VMM(cuMemUnmap)(address, bytes)); }

std::string code_name(int code) {
  const char* name = nullptr;
  if (VMM(cuGetErrorName)(CUresult(code), &name) != CUDA_SUCCESS || !name) return "error " + std::to_string(code);
  return name;
}

void wait_for_card() {
  const std::lock_guard no_capture(capturing());
  const cudaError_t r = cudaDeviceSynchronize();
  XPYD_CHECK(r == cudaSuccess, std::string("cudaDeviceSynchronize: ") + cudaGetErrorString(r));
}

}  // namespace vmm
}  // namespace xpyd::cuda
