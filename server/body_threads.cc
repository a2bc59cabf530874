#include "server/body_threads.h"

#include <algorithm>
#include <utility>

namespace xpyd::server {
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

void BodyThreads::run(const std::string& client, size_t body_bytes, Work work) {
  std::lock_guard lock(mutex_);
  Line& line = body_bytes <= kSmallBytes ? small_ : large_;
  auto at = std::ranges::find(line, client, &Line::value_type::first);
  if (at == line.end()) at = line.insert(at, {client, {}});
  at->second.push_back(std::move(work));
  if (threads_.empty()) {
    const unsigned n = std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u);
    for (unsigned i = 0; i <= n; ++i) threads_.emplace_back([this, i] { loop(i == 0); });
  }
  changed_.notify_all();
}

void BodyThreads::loop(bool small_only) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopped_ || !small_.empty() || (!small_only && !large_.empty()); });
    if (stopped_) return;
    Line& line = small_only || large_.empty() ? small_ : large_;
    const std::string client = line.front().first;
    std::deque<Work>& works = line.front().second;
    Work work = std::move(works.front());
    works.pop_front();
    if (works.empty())
      line.pop_front();
    else
      line.splice(line.end(), line, line.begin());
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    // Who came meanwhile is before this client.
    if (auto at = std::ranges::find(line, client, &Line::value_type::first); at != line.end())
      line.splice(line.end(), line, at);
  }
}

}  // namespace xpyd::server
