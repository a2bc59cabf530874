// CUDA as a Device (base/device/device.h). A list of copies is one kernel launch: the list is uploaded from pinned
// memory, and thread blocks move the pieces. Small pieces between the card and host memory, such as a block's in
// layer_major, also go this way, because a copy call would cost 2 us for each. A few thread blocks are enough for the
// bus and leave the other SMs to the models. Large pieces go to the copy engines.
#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "base/cuda/cuda_vmm.h"
#include "base/device/device.h"
#include "base/device/device_cuda.h"

namespace xpyd {
namespace {

constexpr size_t kCopyThreads = 256;
constexpr size_t kPieceBytes = 64 << 10;  // for one thread block: a long copy is cut, so that many share it
constexpr size_t kListCopies = 16384;     // copies of one launch: between two launches the card idles some 10 us
constexpr size_t kWarpBytes = 8 << 10;    // up to this mean of a launch a warp moves a piece, above it a thread block
constexpr int kLists = 4;                 // launches in flight before the host waits for the oldest
// Across the bus 64 GB/s * 3 us are 192 KiB in flight; a warp has 2 KiB in flight, a thread block 16.
constexpr size_t kBusBlocks = 16;
constexpr size_t kEngineBytes = 256 << 10;  // from this mean of a list on the copy engines are as fast

// The copy of one piece by `n_threads` threads, of which this is number `thread`. Each has several loads in flight
// before the first store, which hides most of their latency.
template <class T>
__device__ void copy_as(const Copy& copy, size_t thread, size_t n_threads) {
  constexpr size_t kUnderWay = 8;
  T* __restrict__ to = reinterpret_cast<T*>(copy.destination);
  const T* __restrict__ from = reinterpret_cast<const T*>(copy.source);
  const size_t n = copy.bytes / sizeof(T);
  for (size_t first = thread; first < n; first += kUnderWay * n_threads) {
    T held[kUnderWay];
#pragma unroll
    for (size_t i = 0; i < kUnderWay; ++i)
      if (first + i * n_threads < n) held[i] = from[first + i * n_threads];
#pragma unroll
    for (size_t i = 0; i < kUnderWay; ++i)
      if (first + i * n_threads < n) to[first + i * n_threads] = held[i];
  }
}

// `together` threads of a thread block move one piece: all of them, or a warp.
__global__ void __launch_bounds__(kCopyThreads) copy_list(const Copy* list, size_t n, unsigned together) {
  const size_t teams = kCopyThreads / together, thread = threadIdx.x % together;
  for (size_t i = blockIdx.x * teams + threadIdx.x / together; i < n; i += gridDim.x * teams) {
    const Copy copy = list[i];
    const size_t all = reinterpret_cast<size_t>(copy.destination) | reinterpret_cast<size_t>(copy.source) | copy.bytes;
    if (all % sizeof(uint4) == 0)
      copy_as<uint4>(copy, thread, together);
    else if (all % sizeof(uint32_t) == 0)
      copy_as<uint32_t>(copy, thread, together);
    else
      copy_as<uint8_t>(copy, thread, together);
  }
}

class CudaQueue final : public DeviceQueue, public VendorQueue {
 public:
  // `bus`: its copies are between the card and host memory. `copies`: it has copies at all.
  explicit CudaQueue(bool high_priority, bool bus = false, bool copies = true)
      : stream_(high_priority), bus_(bus), lists_(copies ? kLists : 0) {}
  ~CudaQueue() override { stream_.wait(); }

  void copy(std::span<const Copy> copies, bool) override {
    XPYD_CHECK(!lists_.empty(), "a queue for the vendor's library alone");
    size_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes;
    if (bus_ && bytes >= copies.size() * kEngineBytes) {
      for (const Copy& copy : copies) cuda::copy(copy.destination, copy.source, copy.bytes, stream_);
      return;
    }
    for (const Copy& whole : copies)
      for (size_t done = 0; done < whole.bytes; done += kPieceBytes) {
        if (n_ == kListCopies) send();
        if (n_ == 0) lists_[turn_].free.wait();
        const size_t piece = std::min(kPieceBytes, whole.bytes - done);
        lists_[turn_].host.as<Copy>()[n_++] = {whole.source + done, whole.destination + done, piece};
        bytes_ += piece;
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
    // Marks complete in order: all marks before the first that is not done are done.
    while (!marks_.empty() && marks_.front()->done()) {
      spare_.push_back(std::move(marks_.front()));
      marks_.pop_front();
    }
    return mark < last_mark_ - int64_t(marks_.size());
  }
  void wait() override { stream_.wait(); }
  Result<std::optional<DmaBuf>> dma_buf(std::span<std::byte> memory) override {
    constexpr uint64_t kPage = 4096;
    const auto at = reinterpret_cast<uint64_t>(memory.data());
    const uint64_t begin = at / kPage * kPage;
    const uint64_t end = (at + memory.size() + kPage - 1) / kPage * kPage;
    int file = -1;
    if (int code = cuda::vmm::export_dma_buf(&file, begin, end - begin))
      return Error{ErrorCode::unavailable,
                   "the driver exports no dma-buf of the card's memory: " + cuda::vmm::code_name(code)};
    return std::optional<DmaBuf>(DmaBuf(file, at - begin));
  }
  void* handle() override { return stream_.handle(); }
  // A stream without lists: it is made while kernels wait for a peer, and an allocation would wait for these kernels.
  std::unique_ptr<DeviceQueue> make_beside() override { return std::make_unique<CudaQueue>(false, false, false); }
  cuda::Stream& stream() { return stream_; }

 private:
  struct List {
    List() {
      if (auto made = cuda::Memory::device(kListCopies * sizeof(Copy))) device = std::move(made).value();
    }
    cuda::Memory host = cuda::Memory::pinned(kListCopies * sizeof(Copy));
    cuda::Memory device;  // empty if the card was full; then `host` is read over the bus
    cuda::Event free;     // recorded after the launch that reads it
  };
  void send() {
    List& list = lists_[turn_];
    const cuda::Memory& read = list.device.size() > 0 ? list.device : list.host;
    if (&read == &list.device) cuda::copy(list.device.data(), list.host.data(), n_ * sizeof(Copy), stream_);
    const size_t together = bus_ || bytes_ <= n_ * kWarpBytes ? 32 : kCopyThreads, teams = kCopyThreads / together;
    const size_t blocks = (n_ + teams - 1) / teams;
    cuda::launch(copy_list, "copy_list",
                 {.grid = unsigned(bus_ ? std::min(blocks, kBusBlocks) : blocks), .block = unsigned(kCopyThreads)},
                 stream_, read.as<const Copy>(), n_, unsigned(together));
    list.free.record(stream_);
    turn_ = (turn_ + 1) % kLists;
    n_ = bytes_ = 0;
  }

  cuda::Stream stream_;
  const bool bus_ = false;
  std::vector<List> lists_;
  int turn_ = 0;
  size_t n_ = 0, bytes_ = 0;                        // copies in lists_[turn_]
  std::deque<std::unique_ptr<cuda::Event>> marks_;  // marks that are not known to be done
  std::vector<std::unique_ptr<cuda::Event>> spare_;
  int64_t last_mark_ = 0;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(bool priorities) : priorities_(priorities) {}
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
  // Copies and the copy kernel reach pinned memory at the speed of the bus, and other host memory not at all.
  Result<std::shared_ptr<std::byte>> allocate_host(size_t bytes) override {
    Result<cuda::Memory> memory = cuda::Memory::try_pinned(bytes);
    if (!memory) return memory.error();
    auto owner = std::make_shared<cuda::Memory>(std::move(memory).value());
    std::memset(owner->data(), 0, bytes);
    return std::shared_ptr<std::byte>(owner, owner->data());
  }
  std::unique_ptr<DeviceQueue> make_copy_queue(double) override { return std::make_unique<CudaQueue>(false, true); }
  Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) override {
    return make_cuda_page_groups(options);
  }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override {
    return std::make_unique<CudaQueue>(priorities_ && phase == Phase::decode);
  }

 private:
  const bool priorities_;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device(bool priorities) { return std::make_unique<CudaDevice>(priorities); }

cuda::Stream& stream_of(DeviceQueue& queue) { return static_cast<CudaQueue&>(queue).stream(); }

}  // namespace xpyd
