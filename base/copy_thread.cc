#include "base/copy_thread.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace xpyd {
namespace {

void sleep_until(double time_s) {
  const timespec t{time_t(time_s), long((time_s - double(time_t(time_s))) * 1e9)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

}  // namespace

CopyThread::CopyThread(double gbps) : gbps_(gbps), thread_([this] { work(); }) {}

CopyThread::~CopyThread() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

void CopyThread::copy(std::span<const Copy> copies, bool read_soon) {
  Job job{{copies.begin(), copies.end()}, read_soon};
  ++enqueued_;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(job));
  }
  posted_.notify_one();
}

void CopyThread::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return reached(enqueued_); });
}

void CopyThread::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    posted_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run(job);
    lock.lock();
    done_.fetch_add(1, std::memory_order_release);
    finished_.notify_all();
  }
}

void CopyThread::run(const Job& job) {
  size_t bytes = 0;
  for (const Copy& copy : job.copies) bytes += copy.bytes;
  RealClock clock;
  const double start = clock.now();
  if (!job.read_soon) {
    copy_streaming(job.copies);
  } else {
    for (const Copy& copy : job.copies) std::memcpy(copy.destination, copy.source, copy.bytes);
  }
  if (gbps_ <= 0) return;
  wire_free_s_ = std::max(wire_free_s_, start) + double(bytes) / (gbps_ * 1e9);
  if (wire_free_s_ > clock.now()) sleep_until(wire_free_s_);
}

}  // namespace xpyd
