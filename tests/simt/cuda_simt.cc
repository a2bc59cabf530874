// Implements base/cuda/cuda.h on the interpreter. Work on a stream is done when the call that enqueues it returns.
// Inside a capture it is kept for Graph::launch instead, and on late streams it runs only when something waits for it.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/cuda/cuda.h"
#include "device_memory.h"

using xpyd::cuda::simt::host_fault;
using Work = std::function<void()>;
using Recording = std::vector<Work>;

// The work that a late stream has not done yet. All streams share one lock, because one may have to run another's work.
struct Queue {
  std::deque<Work> works;
  uint64_t n_done = 0;
  uint64_t end() const { return n_done + works.size(); }
};
struct Moment {  // recorded by an event
  std::shared_ptr<Queue> queue;
  uint64_t end = 0;  // done when queue->n_done reaches it
  std::chrono::steady_clock::time_point time{};
};
struct CUstream_st {
  Recording* recording = nullptr;  // the capture of this stream that is under way
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
};
struct CUevent_st {
  bool timing = false;
  std::shared_ptr<Moment> moment;
};

namespace xpyd::cuda {

namespace {

// The live device and pinned memory of the process, and the limit of its device memory.
struct Registry {
  enum Kind { device, pinned, mapped };  // mapped: behind addresses of vmm_simt.cc
  struct Range {
    size_t bytes;
    Kind kind;
  };
  std::mutex mutex;
  std::map<const std::byte*, Range> ranges;
  size_t limit = default_limit, used = 0;
  std::atomic<uint64_t> generation = 1;
  static constexpr size_t default_limit = size_t{1} << 30;

  bool take(size_t bytes) {
    std::lock_guard lock(mutex);
    if (bytes > limit - std::min(limit, used)) return false;
    used += bytes;
    return true;
  }
  void give(size_t bytes) {
    std::lock_guard lock(mutex);
    used -= bytes;
  }

  // Adjacent mappings count as one. begin and range_bytes describe the first of them.
  bool contains(const void* at, size_t bytes, const std::byte** begin = nullptr, size_t* range_bytes = nullptr) {
    auto p = static_cast<const std::byte*>(at);
    std::lock_guard lock(mutex);
    auto range = ranges.upper_bound(p);
    if (range == ranges.begin()) return false;
    --range;
    if (begin) *begin = range->first, *range_bytes = range->second.bytes;
    size_t offset = size_t(p - range->first);
    if (offset > range->second.bytes) return false;
    while (bytes > range->second.bytes - offset) {
      bytes -= range->second.bytes - offset;
      const std::byte* end = range->first + range->second.bytes;
      if (range->second.kind != mapped || ++range == ranges.end() || range->first != end) return false;
      if (range->second.kind != mapped) return false;
      offset = 0;
    }
    return true;
  }
  void add(const std::byte* begin, size_t bytes, Kind kind) {
    std::lock_guard lock(mutex);
    ranges[begin] = {bytes, kind};
    generation.fetch_add(1);
  }
  void remove(const std::byte* begin) {
    std::lock_guard lock(mutex);
    auto it = ranges.find(begin);
    XPYD_CHECK(it != ranges.end());
    if (it->second.kind == device) used -= it->second.bytes;
    ranges.erase(it);
    generation.fetch_add(1);
  }
};
Registry& registry() {
  static Registry instance;
  return instance;
}

constexpr size_t graph_bytes = 64 << 10;       // device memory that a graph takes
thread_local CUstream_st* captured = nullptr;  // the stream that this thread captures

void refuse_in_capture(const char* what) {
  if (captured) host_fault(std::string(what) + " inside a capture");
}
bool is_memory(const void* at, size_t bytes, const char* what) {
  if (bytes == 0 || registry().contains(at, bytes)) return true;
  host_fault(std::string(what) + ": " + std::to_string(bytes) + " bytes that are neither device nor pinned memory");
  return false;
}

struct Late {
  std::recursive_mutex mutex;
  std::atomic<bool> on = false;
  std::vector<std::weak_ptr<Queue>> queues;  // all that ever kept work

  void push(const std::shared_ptr<Queue>& queue, Work work) {
    std::lock_guard lock(mutex);
    if (queue->end() == 0) queues.push_back(queue);
    queue->works.push_back(std::move(work));
  }
  // Returns true if nothing was left to do.
  bool drain(Queue& queue, uint64_t end) {
    std::lock_guard lock(mutex);
    bool nothing = queue.n_done >= end;
    while (queue.n_done < end) {
      const Work next = std::move(queue.works.front());  // removed from the queue before it runs
      queue.works.pop_front();
      ++queue.n_done;
      next();
    }
    return nothing;
  }
  bool drain(Queue& queue) {
    std::lock_guard lock(mutex);
    return drain(queue, queue.end());
  }
  void drain_all() {
    std::lock_guard lock(mutex);
    std::erase_if(queues, [](const auto& queue) { return queue.expired(); });
    auto live = queues;
    for (const auto& weak : live)
      if (auto queue = weak.lock()) drain(*queue);
  }
};
Late& late() {
  static Late instance;
  return instance;
}

void enqueue(cudaStream_t stream, Work work) {
  if (stream->recording)
    stream->recording->push_back(std::move(work));
  else if (late().on.load())
    late().push(stream->queue, std::move(work));
  else
    work();
}

}  // namespace

namespace simt {

bool keeps_work(cudaStream_t stream) { return stream->recording || late().on.load(); }
void keep(cudaStream_t stream, std::function<void()> run) { enqueue(stream, std::move(run)); }
void set_late_streams(bool on) {
  late().on = on;
  if (!on) late().drain_all();
}

void set_device_memory_limit(size_t bytes) {
  std::lock_guard lock(registry().mutex);
  registry().limit = bytes ? bytes : Registry::default_limit;
}
bool take_device_memory(size_t bytes) { return registry().take(bytes); }
void give_device_memory(size_t bytes) { registry().give(bytes); }
void add_device_range(const std::byte* begin, size_t bytes) { registry().add(begin, bytes, Registry::mapped); }
void remove_device_range(const std::byte* begin) { registry().remove(begin); }
void run_late_work() { late().drain_all(); }
bool is_device_memory(const void* begin, size_t bytes) {
  // Kernels ask for every 16 bytes, so the last range is remembered.
  thread_local const std::byte* first = nullptr;
  thread_local size_t range_bytes = 0;
  thread_local uint64_t generation = 0;
  uint64_t now = registry().generation.load();
  size_t offset = size_t(static_cast<const std::byte*>(begin) - first);
  if (generation == now && offset < range_bytes && bytes <= range_bytes - offset) return true;
  generation = now;
  return registry().contains(begin, bytes, &first, &range_bytes);
}

}  // namespace simt

Result<Card> open() {
  Card card;
  card.name = "SIMT interpreter";
  card.major = 9;
  card.minor = 0;
  card.n_sms = 4;
  std::lock_guard lock(registry().mutex);
  card.memory_bytes = registry().limit;
  card.free_bytes = registry().limit - std::min(registry().limit, registry().used);
  card.max_shared_bytes = 227 * 1024;
  card.driver = card.runtime = 13000;
  return card;
}

Stream::Stream(bool) : handle_(new CUstream_st) {}
Stream::~Stream() {
  late().drain(*handle_->queue);
  delete handle_;
}
void Stream::wait() {
  refuse_in_capture("waiting for a stream");
  late().drain(*handle_->queue);
}
Event::Event(bool timing) : handle_(new CUevent_st{.timing = timing}) {}
Event::~Event() { delete handle_; }
void Event::record(Stream& stream) {
  if (stream.handle()->recording) return host_fault("an event recorded inside a capture");
  auto moment = handle_->moment = std::make_shared<Moment>();
  enqueue(stream.handle(), [moment] { moment->time = std::chrono::steady_clock::now(); });
  std::lock_guard lock(late().mutex);
  moment->queue = stream.handle()->queue;
  moment->end = moment->queue->end();
}
bool Event::done() const {
  refuse_in_capture("asking an event");
  return !handle_->moment || late().drain(*handle_->moment->queue, handle_->moment->end);
}
void Event::wait() const {
  refuse_in_capture("waiting for an event");
  if (handle_->moment) late().drain(*handle_->moment->queue, handle_->moment->end);
}
void Event::hold(Stream& stream) const {
  if (stream.handle()->recording) return host_fault("an event held by a stream inside a capture");
  if (!handle_->moment || !late().on) return;
  late().push(stream.handle()->queue, [moment = handle_->moment] { late().drain(*moment->queue, moment->end); });
}
double Event::seconds(const Event& begin, const Event& end) {
  XPYD_CHECK(begin.handle_->timing && end.handle_->timing);
  XPYD_CHECK(begin.handle_->moment && end.handle_->moment);
  return std::chrono::duration<double>(end.handle_->moment->time - begin.handle_->moment->time).count();
}

Graph::~Graph() {
  if (handle_) registry().give(graph_bytes);
  delete static_cast<std::shared_ptr<Recording>*>(handle_);
}
void Graph::begin_capture(Stream& stream) {
  XPYD_CHECK(!captured, "one capture per thread at a time");
  capturing().lock();
  captured = stream.handle();
  captured->recording = new Recording;
}
Graph Graph::end_capture(Stream& stream) {
  XPYD_CHECK(captured == stream.handle());
  Graph graph;
  const std::shared_ptr<Recording> recording(captured->recording);
  if (registry().take(graph_bytes)) graph.handle_ = new std::shared_ptr<Recording>(recording);
  captured->recording = nullptr;
  captured = nullptr;
  capturing().unlock();
  return graph;
}
void Graph::launch(Stream& stream) const {
  XPYD_CHECK(handle_);
  XPYD_CHECK(!stream.handle()->recording, "a graph launched inside a capture");
  enqueue(stream.handle(), [recording = *static_cast<std::shared_ptr<Recording>*>(handle_)] {
    for (const Work& work : *recording) work();
  });
}

Result<Memory> Memory::device(size_t bytes) {
  refuse_in_capture("allocating");
  Registry& r = registry();
  if (!r.take(bytes)) {
    std::lock_guard lock(r.mutex);
    return Error{ErrorCode::unavailable, "out of device memory: " + std::to_string(bytes) + " bytes asked for, " +
                                             std::to_string(r.limit - std::min(r.limit, r.used)) + " free"};
  }
  Memory memory;
  memory.bytes_ = bytes;
  memory.data_ = static_cast<std::byte*>(std::aligned_alloc(256, std::max<size_t>(1, (bytes + 255) / 256) * 256));
  XPYD_CHECK(memory.data_);
  std::memset(memory.data_, 0xff, bytes);  // NaN in every float type
  r.add(memory.data_, bytes, Registry::device);
  return memory;
}
Memory Memory::pinned(size_t bytes) {
  Result<Memory> memory = try_pinned(bytes);
  XPYD_CHECK(memory.ok());
  return std::move(memory).value();
}
Result<Memory> Memory::try_pinned(size_t bytes) {
  refuse_in_capture("allocating");
  Memory memory;
  memory.bytes_ = bytes;
  memory.pinned_ = true;
  memory.data_ = static_cast<std::byte*>(std::aligned_alloc(4096, std::max<size_t>(1, (bytes + 4095) / 4096) * 4096));
  if (!memory.data_)
    return Error{ErrorCode::unavailable, "out of pinned host memory: " + std::to_string(bytes) + " bytes wanted"};
  registry().add(memory.data_, bytes, Registry::pinned);
  return Result<Memory>(std::move(memory));
}
Memory::~Memory() {
  if (!data_) return;
  late().drain_all();  // as cudaFree and cudaFreeHost do
  registry().remove(data_);
  std::free(data_);
}

void copy(void* destination, const void* source, size_t bytes, Stream& stream) {
  enqueue(stream.handle(), [=] {
    if (is_memory(destination, bytes, "copy to") && is_memory(source, bytes, "copy from") && bytes > 0)
      std::memmove(destination, source, bytes);
  });
}
void fill(void* destination, int byte, size_t bytes, Stream& stream) {
  enqueue(stream.handle(), [=] {
    if (is_memory(destination, bytes, "fill") && bytes > 0) std::memset(destination, byte, bytes);
  });
}

}  // namespace xpyd::cuda
