// base/cuda/cuda.h over the CUDA runtime.
#include <map>
#include <mutex>

#include "base/cuda/cuda.h"

namespace xpyd::cuda {
namespace {

void check(cudaError_t result, const char* call) {
  XPYD_CHECK(result == cudaSuccess, std::string(call) + ": " + cudaGetErrorString(result));
}
#define CUDA_DO(call) check(call, #call)

bool ready(cudaError_t state) {
  if (state == cudaErrorNotReady) return false;
  CUDA_DO(state);
  return true;
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  CUDA_DO(cudaDeviceGetAttribute(&value, which, 0));
  return value;
}

}  // namespace

Result<Card> open() {
  Card card;
  cudaRuntimeGetVersion(&card.runtime);
  cudaDriverGetVersion(&card.driver);
  int n_cards = 0;
  if (cudaError_t found = cudaGetDeviceCount(&n_cards); found != cudaSuccess)
    return Error{ErrorCode::unavailable,
                 std::string("--device cuda: no NVIDIA card can be used: ") + cudaGetErrorString(found)};
  cudaDeviceProp properties{};
  CUDA_DO(cudaGetDeviceProperties(&properties, 0));
  card.name = properties.name;
  card.major = properties.major;
  card.minor = properties.minor;
  if (card.major < 8)
    return Error{ErrorCode::unavailable, "--device cuda: " + card.name + " has compute capability " +
                                             std::to_string(card.major) + "." + std::to_string(card.minor) +
                                             "; expected at least 8.0 (A100)"};
  if (cudaError_t set = cudaSetDevice(0); set != cudaSuccess)
    return Error{ErrorCode::unavailable, "--device cuda: " + card.name + " cannot be used: " + cudaGetErrorString(set)};
  card.n_sms = properties.multiProcessorCount;
  card.max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  CUDA_DO(cudaMemGetInfo(&card.free_bytes, &card.memory_bytes));
  return card;
}

Stream::Stream(bool high_priority) {
  int least = 0, greatest = 0;
  CUDA_DO(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_DO(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, high_priority ? greatest : least));
}
Stream::~Stream() { cudaStreamDestroy(handle_); }
void Stream::wait() { CUDA_DO(cudaStreamSynchronize(handle_)); }

Event::Event(bool timing) {
  CUDA_DO(cudaEventCreateWithFlags(&handle_, timing ? cudaEventDefault : cudaEventDisableTiming));
}
Event::~Event() { cudaEventDestroy(handle_); }
void Event::record(Stream& stream) { CUDA_DO(cudaEventRecord(handle_, stream.handle())); }
bool Event::done() const { return ready(cudaEventQuery(handle_)); }
void Event::wait() const { CUDA_DO(cudaEventSynchronize(handle_)); }
void Event::hold(Stream& stream) const { CUDA_DO(cudaStreamWaitEvent(stream.handle(), handle_, 0)); }
double Event::seconds(const Event& begin, const Event& end) {
  float ms = 0;
  CUDA_DO(cudaEventElapsedTime(&ms, begin.handle_, end.handle_));
  return 1e-3 * double(ms);
}

Graph::~Graph() {
  if (handle_) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle_));
}
void Graph::begin_capture(Stream& stream) {
  capturing().lock();
  // Thread-local mode: another instance's thread may allocate or wait meanwhile.
  CUDA_DO(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
}
Graph Graph::end_capture(Stream& stream) {
  cudaGraph_t captured = nullptr;
  CUDA_DO(cudaStreamEndCapture(stream.handle(), &captured));
  capturing().unlock();
  cudaGraphExec_t executable = nullptr;
  cudaError_t made = cudaGraphInstantiate(&executable, captured, 0);
  CUDA_DO(cudaGraphDestroy(captured));
  Graph graph;
  if (made == cudaSuccess) {
    graph.handle_ = executable;
    made = cudaGraphUpload(executable, stream.handle());  // so that a launch allocates nothing
  }
  if (made == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return Graph();
  }
  check(made, "cudaGraphInstantiate, cudaGraphUpload");
  return graph;
}
void Graph::launch(Stream& stream) const {
  XPYD_CHECK(handle_ != nullptr, "an empty graph");
  CUDA_DO(cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_), stream.handle()));
}

Memory::~Memory() {
  if (!data_) return;
  if (pinned_)
    cudaFreeHost(data_);
  else
    cudaFree(data_);
}
Result<Memory> Memory::allocate(size_t bytes, bool pinned) {
  Memory memory;
  memory.pinned_ = pinned;
  if (bytes == 0) return Result<Memory>(std::move(memory));
  void* data = nullptr;
  const cudaError_t result = pinned ? cudaHostAlloc(&data, bytes, cudaHostAllocDefault) : cudaMalloc(&data, bytes);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, which is a normal outcome that later calls should not report
    const std::string wanted = std::to_string(bytes) + " bytes requested";
    if (pinned) return Error{ErrorCode::unavailable, "out of pinned host memory: " + wanted};
    size_t free = 0, all = 0;
    CUDA_DO(cudaMemGetInfo(&free, &all));
    return Error{ErrorCode::unavailable, "out of device memory: " + wanted + ", " + std::to_string(free) + " of " +
                                             std::to_string(all) + " free"};
  }
  check(result, pinned ? "cudaHostAlloc" : "cudaMalloc");
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  return Result<Memory>(std::move(memory));
}
Result<Memory> Memory::device(size_t bytes) { return allocate(bytes, false); }
Result<Memory> Memory::try_pinned(size_t bytes) { return allocate(bytes, true); }
Memory Memory::pinned(size_t bytes) {
  Result<Memory> memory = try_pinned(bytes);
  XPYD_CHECK(memory.ok(), memory.ok() ? "" : memory.error().message);
  return std::move(memory).value();
}

void copy(void* destination, const void* source, size_t bytes, Stream& stream) {
  CUDA_DO(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, stream.handle()));
}
void fill(void* destination, int byte, size_t bytes, Stream& stream) {
  CUDA_DO(cudaMemsetAsync(destination, byte, bytes, stream.handle()));
}

void launch_kernel(const void* kernel, const char* name, const Shape& shape, void** args, Stream& stream) {
  if (shape.shared_bytes > (48 << 10)) {  // more than every kernel may have must be requested once
    static std::mutex mutex;
    static std::map<const void*, size_t> allowed;
    std::lock_guard lock(mutex);
    if (size_t& bytes = allowed[kernel]; bytes < shape.shared_bytes) {
      bytes = shape.shared_bytes;
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), name);
      // Such a kernel streams through shared memory. It gets all that an SM has of it, so that as many thread blocks as
      // possible fit; L1 gets the rest.
      check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          name);
    }
  }
  check(cudaLaunchKernel(kernel, shape.grid, shape.block, args, shape.shared_bytes, stream.handle()), name);
}

}  // namespace xpyd::cuda
