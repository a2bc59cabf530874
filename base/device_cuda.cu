// CUDA as a Device (base/device.h). A list of copies is one launch: the list goes up in pinned
// memory, and each block of threads moves pieces of it.
#include <algorithm>
#include <deque>
#include <vector>

#include "base/device_cuda.h"

namespace xpyd {
namespace {

constexpr size_t kCopyThreads = 256;
constexpr size_t kPieceBytes =
    64 << 10;  // of one block: a long copy is cut, so that many blocks share it
constexpr size_t kListCopies = 4096;  // of one launch
constexpr int kLists = 4;             // launches under way before the host waits for the oldest

template <class T>
__device__ void copy_as(std::byte* destination, const std::byte* source, size_t bytes) {
  T* __restrict__ to = reinterpret_cast<T*>(destination);
  const T* __restrict__ from = reinterpret_cast<const T*>(source);
  const size_t n = bytes / sizeof(T);
  size_t i = threadIdx.x;
  // Several loads under way before the first is stored: little else hides their latency.
  for (; i + 3 * kCopyThreads < n; i += 4 * kCopyThreads) {
    const T a = from[i], b = from[i + kCopyThreads], c = from[i + 2 * kCopyThreads],
            d = from[i + 3 * kCopyThreads];
    to[i] = a, to[i + kCopyThreads] = b, to[i + 2 * kCopyThreads] = c, to[i + 3 * kCopyThreads] = d;
  }
  for (; i < n; i += kCopyThreads) to[i] = from[i];
}

__global__ void __launch_bounds__(kCopyThreads) copy_list(const Copy* list) {
  const Copy copy = list[blockIdx.x];
  const size_t all = reinterpret_cast<size_t>(copy.destination) |
                     reinterpret_cast<size_t>(copy.source) | copy.bytes;
  if (all % sizeof(uint4) == 0)
    copy_as<uint4>(copy.destination, copy.source, copy.bytes);
  else if (all % sizeof(uint32_t) == 0)
    copy_as<uint32_t>(copy.destination, copy.source, copy.bytes);
  else
    copy_as<uint8_t>(copy.destination, copy.source, copy.bytes);
}

class CudaQueue final : public DeviceQueue {
 public:
  explicit CudaQueue(bool high_priority) : stream_(high_priority) {}
  explicit CudaQueue(cudaStream_t handle) : stream_(handle) {}
  ~CudaQueue() override { stream_.wait(); }

  void copy(std::span<const Copy> copies, bool) override {
    for (const Copy& whole : copies)
      for (size_t done = 0; done < whole.bytes; done += kPieceBytes) {
        if (n_ == kListCopies) send();
        if (n_ == 0) lists_[turn_].free.wait();
        lists_[turn_].host.as<Copy>()[n_++] = {whole.source + done, whole.destination + done,
                                               std::min(kPieceBytes, whole.bytes - done)};
      }
    if (n_ > 0) send();
  }
  int64_t mark() override {
    if (spare_.empty()) spare_.push_back(std::make_unique<cuda::Event>());
    spare_.back()->record(stream_);
    marks_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    return last_mark_++;
  }
  bool reached(int64_t mark) override {
    // Marks are passed in their order: the ones before the first that is not done are done.
    while (!marks_.empty() && marks_.front()->done()) {
      spare_.push_back(std::move(marks_.front()));
      marks_.pop_front();
    }
    return mark < last_mark_ - int64_t(marks_.size());
  }
  void wait() override { stream_.wait(); }
  cuda::Stream& stream() { return stream_; }

 private:
  struct List {
    cuda::Memory host = cuda::Memory::pinned(kListCopies * sizeof(Copy));
    cuda::Memory device = cuda::Memory::device(kListCopies * sizeof(Copy)).value();
    cuda::Event free;  // the launch that read it is done
  };
  void send() {
    List& list = lists_[turn_];
    cuda::copy(list.device.data(), list.host.data(), n_ * sizeof(Copy), stream_);
    cuda::launch(copy_list, "copy_list", {.grid = unsigned(n_), .block = unsigned(kCopyThreads)},
                 stream_, list.device.as<const Copy>());
    list.free.record(stream_);
    turn_ = (turn_ + 1) % kLists;
    n_ = 0;
  }

  cuda::Stream stream_;
  List lists_[kLists];
  int turn_ = 0;
  size_t n_ = 0;                                    // copies in lists_[turn_]
  std::deque<std::unique_ptr<cuda::Event>> marks_;  // the last ones given out, not known to be done
  std::vector<std::unique_ptr<cuda::Event>> spare_;
  int64_t last_mark_ = 0;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(CudaSharing sharing) : sharing_(std::move(sharing)) {}
  const char* name() const override { return "cuda"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override {
    Result<cuda::Memory> memory = cuda::Memory::device(bytes);
    if (!memory) return memory.error();
    auto owner = std::make_shared<cuda::Memory>(std::move(memory).value());
    cuda::Stream stream;
    cuda::fill(owner->data(), 0, bytes, stream);
    stream.wait();
    return std::shared_ptr<std::byte>(owner, owner->data());
  }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override {
    const bool first = sharing_.priorities && phase == Phase::decode;
    if (!sharing_.split || phase == Phase::both) return std::make_unique<CudaQueue>(first);
    return std::make_unique<CudaQueue>(
        sharing_.split->make_stream(phase == Phase::decode ? 1 : 0, first));
  }

 private:
  CudaSharing sharing_;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device(CudaSharing sharing) {
  return std::make_unique<CudaDevice>(std::move(sharing));
}

cuda::Stream& stream_of(DeviceQueue& queue) { return static_cast<CudaQueue&>(queue).stream(); }

}  // namespace xpyd
