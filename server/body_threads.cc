#include "server/body_threads.h"

#include <algorithm>
#include <utility>

namespace xpyd {
namespace {

constexpr size_t kSmallBytes = 128u << 10;  // some 10 ms

}  // namespace

BodyThreads::~BodyThreads() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void BodyThreads::run(size_t body_bytes, std::function<void()> work) {
  std::lock_guard lock(mutex_);
  (body_bytes <= kSmallBytes ? small_ : large_).push_back(std::move(work));
  if (threads_.empty()) {
    const unsigned n = std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u);
    for (unsigned i = 0; i <= n; ++i) threads_.emplace_back([this, i] { loop(i == 0); });
  }
  changed_.notify_all();
}

void BodyThreads::loop(bool small_only) {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(
          lock, [&] { return stopped_ || !small_.empty() || (!small_only && !large_.empty()); });
      if (stopped_) return;
      auto& from = small_only || large_.empty() ? small_ : large_;
      work = std::move(from.front());
      from.pop_front();
    }
    work();
  }
}

}  // namespace xpyd
